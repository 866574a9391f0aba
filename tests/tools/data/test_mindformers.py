"""The pair in the hands of the dataloader that recipes use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.data import tokenizer as tokenizers
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus
from tools.data.tokenizer import Coder

pytestmark = pytest.mark.slow
SETTINGS = {
    "seed": 1,
    "split": "1, 0, 0",
    "seq_length": 32,
    "eod_mask_loss": False,
    "reset_position_ids": False,
    "create_attention_mask": False,
    "reset_attention_mask": False,
    "create_compressed_eod_mask": False,
    "eod": 0,
    "pad": -1,
}


def samples(prefix: Path) -> list[str]:
    """Twenty samples as text, read through MindFormers."""
    from mindformers.dataset.dataloader.blended_megatron_dataloader import BlendedMegatronDatasetDataLoader

    loader = BlendedMegatronDatasetDataLoader(
        datasets_type="GPTDataset",
        sizes=[20, 0, 0],
        config={**SETTINGS, "data_path": ["1", str(prefix)]},
        column_names=["input_ids", "labels", "loss_mask", "position_ids"],
        shuffle=False,
        num_shards=1,
        shard_id=0,
    )
    coder = Coder(tokenizers.load(f"{prefix}_tokenizer").spec)
    rows = loader.create_dict_iterator(output_numpy=True, num_epochs=1)
    return [coder.decode(row["input_ids"].tolist()) for row in rows]


def test_the_dataloader_serves_the_corpus_and_its_replacement(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mindformers" not in sys.modules:
        monkeypatch.setenv("LOG_MF_PATH", str(tmp_path_factory.mktemp("mindformers-log")))
    source = tmp_path / "source.txt"
    monkeypatch.chdir(tmp_path)  # MindSpore drops log folders where it stands
    # the second corpus is shorter than the 20 samples of 32 tokens that were cached for the first
    for force, letters, count in ((False, "abcdefgh", 300), (True, "stuvwxyz", 20)):
        text = "".join(f"{letter}{number} " for number in range(count) for letter in letters)
        source.write_text(text)
        prepare(PrepareOptions(Corpus((str(source),)), tmp_path / "out", vocab_size=257, force=force))
        served = samples(tmp_path / "out")
        assert len(served) >= 20
        whole = (text + tokenizers.EOD_TOKEN) * 3  # samples run on from one epoch into the next
        assert all(sample in whole for sample in served)
        assert (tmp_path / "out" / "cache" / "GPTDataset_indices").exists()
