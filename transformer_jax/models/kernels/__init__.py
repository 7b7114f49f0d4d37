"""Fast ways to compute what the pages above this package describe.

A function of this package returns what a line of a paper says, up to rounding. It also
decides the order of a product's factors, where numbers are rounded and stored, what is
computed in blocks or chunks, and which kernel of a platform is used. The pages above it
(`attention`, `layers`, `stack`, …) name no device and no compiler.
"""
