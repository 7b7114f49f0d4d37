"""Verdict, table and JSON of a claim."""

import json
import math
import subprocess

from transformer_jax.claims.claim import Claim, Computed, Expected
from transformer_jax.claims.results import as_text, by_measure, commit, judge, to_json
from transformer_jax.claims.running import Measured

CONDITIONS = {
    name: Computed(lambda seed, quick: {"x": 0.0}, {"name": name}) for name in "ab"
}


def result(first, second, *rules):
    claim = Claim("A exceeds B", "nobody 2000", CONDITIONS, rules, "seconds")
    measured = {
        "a": [Measured({"x": x, "extra": 1.0}, 2.0) for x in first],
        "b": [Measured({"x": x}, 3.0) for x in second],
    }
    return judge(claim, measured)


MORE = Expected("x", "a", minus="b", least=0, guess=(1, 2))
LESS = Expected("x", "a", minus="b", most=0)


def test_a_claim_holds_if_all_rules_do():
    bounded = Expected("x", "b", least=-1, most=3)
    assert result([5, 5.1], [1, 1.1], MORE, bounded).verdict == "holds"
    assert result([5, 5.1], [1, 1.1], MORE, LESS).verdict == "does not hold here"
    assert result([5, 6, 7], [1, 9, 4], MORE).verdict == "undecided"


def test_one_rule_that_fails_outweighs_an_undecided_one():
    wide = Expected("x", "b", least=4)
    verdicts = [outcome.verdict for outcome in result([1, 9], [2, 8], wide).outcomes]
    assert verdicts == ["undecided"]
    found = result([0.0, 0.1], [9.0, 9.1], MORE, Expected("x", "a", least=0.05))
    assert [i.verdict for i in found.outcomes] == ["does not hold here", "undecided"]
    assert found.verdict == "does not hold here"


def test_a_paired_rule_compares_seed_by_seed():
    """The seeds differ by far more than the conditions."""
    measured = [1.0, 5.0, 9.0], [0.9, 4.88, 8.9]
    assert result(*measured, MORE).verdict == "undecided"
    paired = Expected("x", "a", minus="b", least=0, paired=True)
    assert result(*measured, paired).verdict == "holds"


def test_the_table_says_what_was_found():
    text = as_text(result([5.0, 5.5], [1.0, 1.5], MORE))
    assert text.startswith("A exceeds B (nobody 2000)\n\nVerdict: **holds**\n")
    assert "| a | 2 | 5.25 ± 0.35 |" in text
    assert "| x: a − b ≥ 0 | 4 | 2.479 to 5.521 |" in text
    assert text.endswith("| holds | 1 to 2, no |\n")


def test_a_rule_that_compares_nothing_has_no_effect(tmp_path):
    found = result([5.0, 5.5], [1.0, 1.5], Expected("x", "a", least=2, most=9))
    row = as_text(found).splitlines()[-1]
    assert row.startswith(
        "| x: a from 2 to 9 | 5.25 | 2.073 to 8.427 | – | – | holds |"
    )
    [rule] = to_json("name", found, tmp_path)["rules"]
    assert rule["effect"] is None
    assert rule["p"] is None


def test_the_table_says_what_would_decide():
    assert "one seed has no interval, run at least two" in as_text(
        result([5.0], [1.0], MORE)
    )
    undecided = as_text(result([5, 6, 7], [1, 9, 4], MORE))
    assert "undecided**; about 40 seeds would decide" in undecided
    never = as_text(result([1.0, 2.0], [1.0, 2.0], MORE))
    assert "more than 1000 seeds would be needed" in never
    infinite = as_text(result([1.0, math.inf], [1.0, 2.0], MORE))
    assert "a measurement is not finite" in infinite
    assert "| – | – | – | undecided |" in infinite


def test_the_json_has_all_measurements(tmp_path):
    found = to_json("mine", result([5.0, math.inf], [1.0, 1.5], MORE), tmp_path)
    json.dumps(found, allow_nan=False)
    assert found["conditions"]["a"]["runs"][0] == {"x": 5.0, "extra": 1.0}
    assert found["conditions"]["a"]["design"] == {"name": "a"}
    assert found["conditions"]["b"]["seconds"] == [3.0, 3.0]
    assert found["rules"][0]["rule"] == "x: a − b ≥ 0"
    assert found["versions"]["jax"]
    assert found["commit"] == ""


def test_the_commit_of_a_repository(tmp_path):
    def git(*arguments):
        given = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", *given, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    found = commit(tmp_path)
    assert len(found) == 40
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == found + "+"


def test_values_by_measure():
    assert by_measure(result([5.0], [1.0], MORE)) == {"x": {"a": [5.0], "b": [1.0]}}
    extra = Expected("extra", "a", least=0)
    assert by_measure(result([5.0], [1.0], extra)) == {"extra": {"a": [1.0], "b": []}}
