"""What several test files share: corpora, small runs, scripts, oracles and folders."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
