"""The stages of post-training, each a LightningModule: supervised fine-tuning and policy optimization."""
