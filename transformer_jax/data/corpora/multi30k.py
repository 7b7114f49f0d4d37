"""Multi30k as a tfds data set: English captions of photographs from Flickr, with German
and French translations.

The data set is described in Elliott, Frank, Sima'an and Specia 2016, "Multi30K:
Multilingual English-German Image Descriptions". French and the two test sets of 2017,
one of which has pictures of MS COCO, are described in Elliott, Frank, Barrault,
Bougares and Specia 2017, "Findings of the Second Shared Task on Multimodal Machine
Translation and Multilingual Image Description".

The text is raw, i.e. not tokenized: `data/task1/raw` of
https://github.com/multi30k/dataset. There are 29,000 pairs in `train`, 1,014 in `val`,
1,000 in each of `test_2016_flickr` and `test_2017_flickr`, and 461 in
`test_2017_mscoco`.

Licence: the maintainers refer to the terms of Flickr30k
(https://github.com/multi30k/dataset/issues/8), which cover research. Read them before
any other use.
"""

from collections.abc import Iterator

import tensorflow_datasets as tfds
from etils import epath

from transformer_jax.data.sources import DataError, parallel_files

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
PAIRS = ("en-de", "en-fr", "de-fr")
SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


class Multi30k(tfds.core.GeneratorBasedBuilder):
    """Builder with the configs `en-de`, `en-fr`, `de-fr`.

    The features are the languages; example i is their line i.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = tuple(
        tfds.core.BuilderConfig(name=pair, description=pair) for pair in PAIRS
    )
    MANUAL_DOWNLOAD_INSTRUCTIONS = """
    Optional: {split}.{language} or {split}.{language}.gz for both languages. If there
    are any, nothing is downloaded. The splits train and val are then required, and
    those test splits are used that exist.
    """

    def _info(self) -> tfds.core.DatasetInfo:
        languages = self.builder_config.name.split("-")
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.Translation(languages=languages),
            supervised_keys=tuple(languages),
            homepage="https://github.com/multi30k/dataset",
            citation=(
                "Elliott et al. 2016, arXiv:1605.00459; "
                "Elliott et al. 2017, arXiv:1710.07177"
            ),
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator]:
        languages = self.builder_config.name.split("-")
        try:
            folder = dl_manager.manual_dir
        except (AssertionError, DataError):  # missing or empty
            existing = set()
        else:
            existing = {
                split
                for split in SPLITS
                for name in languages
                if list(folder.glob(f"{split}.{name}*"))
            }
        if not existing:
            folder = self._download(dl_manager, languages)
            existing = set(SPLITS)
        needed = {"train", "val"}
        return {
            split: self._generate_examples(folder, split, languages)
            for split in SPLITS
            if split in existing | needed
        }

    def _download(
        self, dl_manager: tfds.download.DownloadManager, languages: list[str]
    ) -> epath.Path:
        """Return a folder with the downloaded files under their original names,
        which tfds changes.
        """
        files = [f"{split}.{language}.gz" for split in SPLITS for language in languages]
        folder = dl_manager.download_dir / "multi30k_raw"
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in zip(
            files, dl_manager.download([f"{URL}/{name}" for name in files]), strict=True
        ):
            path.copy(folder / name, overwrite=True)
        return folder

    def _generate_examples(
        self, folder: epath.Path, split: str, languages: list[str]
    ) -> Iterator[tuple[int, dict[str, str]]]:
        yield from enumerate(parallel_files(folder, split, languages))
