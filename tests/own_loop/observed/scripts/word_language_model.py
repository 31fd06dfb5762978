"""A recurrent language model over columns of a text, without a DataLoader: the hidden state goes from batch to batch."""

from __future__ import annotations

import torch
from record import options
from torch import nn

args = options(__doc__, bptt=10, batch_size=4, lr=1.0, seed=1)
torch.manual_seed(args.seed)
train_data = torch.randint(20, (400,)).view(args.batch_size, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output).view(-1, 20), hidden


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


model, criterion = RNNModel(), nn.CrossEntropyLoss()
hidden = (torch.zeros(1, args.batch_size, 8), torch.zeros(1, args.batch_size, 8))
for i in range(0, train_data.size(0) - 1, args.bptt):
    data, targets = get_batch(train_data, i)
    model.zero_grad()
    hidden = tuple(h.detach() for h in hidden)
    output, hidden = model(data, hidden)
    criterion(output, targets).backward()
    for p in model.parameters():  # plain gradient descent, without an optimizer
        p.data.add_(p.grad, alpha=-args.lr)
args.save()
