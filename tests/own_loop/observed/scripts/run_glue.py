"""A small transformer by Hugging Face's Trainer."""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dump", help="a file for the number of processes")
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
config = BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
rows = [{"input_ids": torch.arange(8) * (i + 1) % 50, "labels": torch.tensor(i % 2)} for i in range(64)]
options = TrainingArguments(
    "out", use_cpu=True, max_steps=4, per_device_train_batch_size=8, save_strategy="no", report_to=[], disable_tqdm=True
)
trainer = Trainer(BertForSequenceClassification(config), options, train_dataset=rows)
trainer.train()
if trainer.is_world_process_zero():
    torch.save({"size": options.world_size}, args.dump)
