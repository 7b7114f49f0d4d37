"""Joined captions."""

from transformer_jax.claims.claim import Setting
from transformer_jax.claims.length import LANGUAGES, joined


def test_short_and_long_lines_are_of_the_same_captions(tmp_path):
    data = tmp_path / "data"
    folder = data / "multi30k" / "tok"
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        for language in LANGUAGES:
            lines = "".join(f"{language} {i}\n" for i in range(9))
            (folder / f"{split}.{language}").write_text(lines)
    setting = Setting(0, tmp_path, tmp_path / "runs", data, tmp_path)
    made = joined(setting)
    assert made == joined(setting)
    of_language = {}
    for language in LANGUAGES:
        short = (made / f"val_short.{language}").read_text().splitlines()
        long = (made / f"val_long.{language}").read_text().splitlines()
        assert sorted(short) == [f"{language} {i}" for i in range(9)]
        assert [len(line.split()) for line in long] == [8, 8]
        of_language[language] = [line.replace(language, "") for line in short + long]
        train = (made / f"train.{language}").read_text().splitlines()
        assert len(train) == 9 + 4 + 3 + 2
    assert of_language["de"] == of_language["en"]
    assert [path.name for path in made.parent.iterdir()] == ["joined"]
