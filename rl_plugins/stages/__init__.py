"""The stages of post-training, each a LightningModule.

Supervised fine-tuning, policy optimization, preference optimization on given and on own responses, reward modelling.
"""
