"""This module enables `plugins.mtp_documents`, with which MTP predicts no token of the following document.

GPTModel creates its `MultiTokenPredictionBlock` directly, without a layer spec, so this module changes the class of the
built block. The values that the block shifts (tokens, labels, loss mask) are set to 0 at the beginning of each document
before they are shifted: after a shift by one place, the end of a document then holds the same values as the end of a
sample. (MindFormers allows one MTP layer; a second MTP layer would shift once more, and would also need shifted
beginnings of documents.) Attention needs no change, because the MTP layer gets the masks of the layers before it.
"""

from __future__ import annotations

from functools import partial

from mindformers.models.telechat3_moe.configuration_telechat3_moe import TeleChat3MoeConfig
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.transformer.multi_token_prediction import MultiTokenPredictionBlock
from mindspore.ops.auto_generate import Mul
from mindspore.ops.operations import NotEqual

from plugins import telechat3_moe
from plugins.mtp_documents.plan import KEY, check
from plugins.private_hooks import relies_on

_DEFAULT_LAYERS = 1
relies_on(TeleChat3MoeConfig.__init__, f"num_nextn_predict_layers={_DEFAULT_LAYERS},")
relies_on(GPTModel, "self.mtp = MultiTokenPredictionBlock(config=self.config, spec=mtp_block_spec)")
for _line in (
    "input_ids = self.roll_tensor(input_ids)",
    "labels = self.roll_tensor(labels)",
    "loss_mask = self.roll_tensor(loss_mask)",
):
    relies_on(MultiTokenPredictionBlock, _line)


def enable(config, settings) -> None:
    """Make the MTP layer of models that are built later predict only within documents.

    Raises:
        RecipeError: the plugin does not support the recipe.
    """
    end_of_document = check(settings, config, layers_of(config.model.model_config))
    telechat3_moe.use_edited_model(config, KEY)
    telechat3_moe.edit_model(KEY, partial(keep_within, end_of_document=end_of_document))


def layers_of(model_config) -> int:
    """Return the number of MTP layers of a model, from one of MindFormers' two keys or, if neither is set, MindFormers'
    default for TeleChat3-MoE.
    """
    written = [model_config[name] for name in ("num_nextn_predict_layers", "mtp_num_layers") if name in model_config]
    return (written[0] or 0) if written else _DEFAULT_LAYERS


def keep_within(model, end_of_document: int) -> None:
    """Make the MTP block of a built GPTModel predict only within documents, which end with the token
    `end_of_document`.
    """
    block, ranks = model.mtp, model.config.data_parallel_size
    block.__class__ = BlockWithinDocuments
    block.end_of_document = end_of_document
    block.differs = NotEqual().shard(((ranks, 1), ()))
    block.keep = Mul().shard(((ranks, 1), (ranks, 1)))


class BlockWithinDocuments(MultiTokenPredictionBlock):
    """A `BlockWithinDocuments` is MindFormers' `MultiTokenPredictionBlock`, but it predicts only within documents; the
    function `keep_within` makes it.
    """

    def continues(self, tokens):
        """Return the result of `plan.continues` for token ids [B, S], in the type of the ids; the first column may
        differ from that result.
        """
        batch, length = self.shape(tokens)
        before = self.slice(tokens, (0, 0), (batch, length - 1), (1, 1))
        before = self.concat_2d((self.cast(self.zeros_op((batch, 1)), tokens.dtype), before))
        return self.cast(self.differs(before, self.end_of_document), tokens.dtype)

    def construct(
        self,
        input_ids,
        position_ids,
        hidden_states,
        attention_mask,
        labels=None,
        rotary_pos_emb=None,
        extra_block_kwargs=None,
        loss_mask=None,
        word_embeddings_weight=None,
        position_embeddings_weight=None,
        tokentype_embeddings_weight=None,
        output_weight=None,
        extra_loss=None,
        attention_loss=None,
    ):
        """Compute the loss as MindFormers' block does; input_ids and labels are int32 [B, S], loss_mask is float32 [B,
        S].
        """
        kept = self.continues(input_ids)
        return super().construct(
            self.keep(input_ids, kept),
            position_ids,
            hidden_states,
            attention_mask,
            labels=self.keep(labels, self.cast(kept, labels.dtype)),
            rotary_pos_emb=rotary_pos_emb,
            extra_block_kwargs=extra_block_kwargs,
            loss_mask=self.keep(loss_mask, self.cast(kept, loss_mask.dtype)),
            word_embeddings_weight=word_embeddings_weight,
            position_embeddings_weight=position_embeddings_weight,
            tokentype_embeddings_weight=tokentype_embeddings_weight,
            output_weight=output_weight,
            extra_loss=extra_loss,
            attention_loss=attention_loss,
        )
