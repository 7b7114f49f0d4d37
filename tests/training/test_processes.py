"""Processes of one run."""

import jax

from transformer_jax.training import processes


def test_a_dead_peer_is_told_from_other_errors(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert processes.peer_has_died(
        ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    )
    assert not processes.peer_has_died(ValueError("shapes do not match"))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    assert not processes.peer_has_died(ValueError("Gloo all-reduce failed"))
