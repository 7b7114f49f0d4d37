"""Made-up translations, and the rows of a data set that is prepared."""

from pathlib import Path

from transformer_jax.data.sources import tfds_source


def lines(corpus: str, language: str, count: int) -> list[str]:
    return [f"{corpus} {language} {i} ä\u2028é" for i in range(count)]


def text(corpus: str, language: str, count: int) -> str:
    return "".join(line + "\n" for line in lines(corpus, language, count))


def rows(
    name: str, directory: Path, split: str, languages: list[str]
) -> list[tuple[str, ...]]:
    source = tfds_source(name, directory, split, languages)
    return list(zip(*(source.column(language) for language in languages), strict=True))
