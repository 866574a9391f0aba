"""TeleChat3-MoE as Hugging Face has it: names, shapes and configuration."""
