"""Fine-tune the model in one process with LightningCLI: python cli.py fit --config cli.yaml"""

from data import QuestionAnswerData
from lightning.pytorch.cli import LightningCLI
from model import LanguageModel

if __name__ == "__main__":
    LightningCLI(LanguageModel, QuestionAnswerData)
