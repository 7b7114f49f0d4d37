"""Sizes of small models. Most are distinct primes, so that a swapped axis fails a
test.
"""

SINGLE_STACK = {
    "vocab_size": 31,
    "num_layers": 2,
    "d_model": 17,
    "d_ff": 19,
    "num_heads": 5,
    "head_dim": 6,
    "value_dim": 7,
    "max_length": 13,
    "max_relative_distance": 2,
    "relative_buckets": 6,
    "max_bucket_distance": 7,
    "norm_epsilon": 1e-3,
}
ENCODER_DECODER = {
    "source_vocab_size": 31,
    "target_vocab_size": 31,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "d_model": 17,
    "d_ff": 19,
    "num_heads": 7,
}
