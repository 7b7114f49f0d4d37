"""Additive attention of the dates model, compared with the position of the year in
the input.
"""

import pytest

import transformer_jax
from helpers.runs import get_config, run
from transformer_jax.data.corpora.dates import SIZES, examples


def year_span(written: str, iso: str) -> tuple[int, int]:
    """Return the span of the year.

    It is at the start or the end and has four or two digits.
    """
    year = iso[:4] if iso[:4] in written else iso[2:4]
    start = 0 if written.startswith(iso[:4]) else written.rindex(year)
    return start, start + len(year)


def test_where_the_year_stands():
    assert year_span("20120120", "2012-01-20") == (0, 4)
    assert year_span("12.01.2012", "2012-01-12") == (6, 10)
    assert year_span("12.12.12", "2012-12-12") == (6, 8)
    assert year_span("1 gen '70", "1970-01-01") == (7, 9)


@pytest.mark.slow
def test_the_year_is_read_where_it_is_written(tmp_path):
    """In at least 90 % of unseen dates, the model looks at the year while it writes
    each of the year's four digits.

    The character with the largest weight may be one away from the year.
    """
    config = get_config("dates", "additive")
    config.data.directory = str(tmp_path / "data")
    run(config, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    assert predictor.evaluate()["exact_match"] > 0.97
    pairs = list(examples("test", SIZES["test"]))
    near = 0
    for (alignment,), (written, iso) in zip(
        predictor.attention([w for w, _ in pairs]), pairs, strict=True
    ):
        start, stop = year_span(written, iso)
        looked_at = alignment.weights[0, 0, :4].argmax(axis=-1)
        near += all(start - 1 <= place <= stop for place in looked_at)
    print(f"{near} of {len(pairs)}")
    assert near >= 0.9 * len(pairs)
