"""Plain equations, for counting."""

from transformer_jax.models.kernels import plain


def test_the_equations_are_used_in_their_context_only():
    assert not plain.is_on()
    with plain.equations():
        assert plain.is_on()
    assert not plain.is_on()
