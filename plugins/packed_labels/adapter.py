"""Has MindFormers' PackingHandler pack as `plan` does."""

from __future__ import annotations

from mindformers.dataset.dataloader.hf_dataloader import HFDataLoader
from mindformers.dataset.handler import packing_handler

from plugins.packed_labels.plan import enough, pack, read
from plugins.private_hooks import relies_on, replace

_shifted = False


def enable(config, settings) -> None:
    """Pack the conversations of `config` (a MindFormerConfig), those that are held out among them.

    Raises:
        RecipeError: a loader whose packing the plugin does not know.
    """
    global _shifted
    _shifted = read(settings, config.train_dataset.data_loader)
    # HFDataLoader looks its handlers up in MindFormers' own module, and in no registry
    relies_on(packing_handler._process_sample, "data[k] += sample[k][1:] + [config.pad_token]")
    replace(packing_handler, "pack_examples", "cur_dataset, tmp_data = _process_sample(", pack_examples)
    line = "dataset = getattr(dataset, process_name)(**kwargs)"
    replace(HFDataLoader, "_process_source", line, staticmethod(process_source))


def pack_examples(dataset, config):
    """Stand in for MindFormers' function of this name: a `datasets.Dataset` of packed samples."""
    from datasets import Dataset

    return Dataset.from_dict(pack(dataset, _shifted, config.seq_length, config.pad_token, config.ignore_token))


def process_source(process_name, dataset, **kwargs):
    """Stand in for HFDataLoader's: a method of `datasets.Dataset`, of which `take` says in words what is too much."""
    if process_name == "take":
        enough(kwargs.get("n", 0), len(dataset))
    return getattr(dataset, process_name)(**kwargs)
