"""TeleChat3-MoE for Ascend with this plugin's experts."""

from __future__ import annotations

from mindformers.models.telechat3_moe.modeling_telechat3_moe_train import TrainingTeleChat3MoeForCausalLM
from mindformers.models.telechat3_moe.utils import TeleChat3MoePreTrainedModel
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from plugins.telechat3_moe import gpt_model


class RoutedTrainingTeleChat3Moe(TrainingTeleChat3MoeForCausalLM):
    """`TrainingTeleChat3MoeForCausalLM` from an edited spec."""

    def __init__(self, config):
        # not the parent's: it builds the spec and the model in one go
        TeleChat3MoePreTrainedModel.__init__(self, config, auto_prefix=False)
        self.model = gpt_model(self.convert_to_transformer_config(config, is_mla_model=True))


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class RoutedTeleChat3MoeForCausalLM:
    """What `architectures:` names on Ascend when the plugin is on (train only)."""

    def __new__(cls, config, *args, **kwargs):
        """Build the training model."""
        return RoutedTrainingTeleChat3Moe(config)
