"""An independent reference of TeleChat3-MoE: Hugging Face's DeepSeek-V3, in a process of its own (report section 3.2).

Nothing here imports MindSpore, and only `model`, `train` and `run` import torch.
"""
