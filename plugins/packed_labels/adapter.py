"""This module replaces the packing of MindFormers' PackingHandler by `plugins.packed_labels.plan.pack`."""

from __future__ import annotations

from mindformers.dataset.dataloader.hf_dataloader import HFDataLoader
from mindformers.dataset.handler import packing_handler

from plugins.packed_labels.plan import enough, pack, read
from plugins.private_hooks import relies_on, replace

_shifted = False


def enable(config, settings) -> None:
    """Pack the conversations of `config` (a MindFormerConfig), including the held-out ones.

    Raises:
        RecipeError: the plugin does not support the packing of the loader.
    """
    global _shifted
    _shifted = read(settings, config.train_dataset.data_loader)
    # HFDataLoader looks its handlers up in MindFormers' own module, and in no registry
    relies_on(packing_handler._process_sample, "data[k] += sample[k][1:] + [config.pad_token]")
    replace(packing_handler, "pack_examples", "cur_dataset, tmp_data = _process_sample(", pack_examples)
    line = "dataset = getattr(dataset, process_name)(**kwargs)"
    replace(HFDataLoader, "_process_source", line, staticmethod(process_source))


def pack_examples(dataset, config):
    """Return a `datasets.Dataset` of packed samples; this replaces MindFormers' function of the same name."""
    from datasets import Dataset

    return Dataset.from_dict(pack(dataset, _shifted, config.seq_length, config.pad_token, config.ignore_token))


def process_source(process_name, dataset, **kwargs):
    """Return the data set after a processing step of MindFormers' HFDataLoader (the method `process_name` of
    `datasets.Dataset`). This function replaces HFDataLoader's own function, and raises a clear error if `take` is
    larger than the number of samples in the data set.
    """
    if process_name == "take":
        enough(kwargs.get("n", 0), len(dataset))
    return getattr(dataset, process_name)(**kwargs)
