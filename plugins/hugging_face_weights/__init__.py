"""TeleChat3-MoE's weights as Hugging Face has them, into MindFormers: `checkpoint.load_path` names their folder."""
