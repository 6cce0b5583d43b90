"""Text classification with an EmbeddingBag, offsets from a collate function, weights for each token."""

import torch
from torch import nn
from torch.utils.data import DataLoader

GOOD, BAD = "good great fine lovely superb".split(), "bad awful poor dreadful dull".split()
OTHER = "the a film plot scene music actor it was very and of".split()
vocab = {word: index for index, word in enumerate(GOOD + BAD + OTHER)}


def sentences(count, generator):
    for _ in range(count):
        label = int(torch.randint(2, (1,), generator=generator))
        words = [OTHER[int(i)] for i in torch.randint(len(OTHER), (6,), generator=generator)]
        words += [(GOOD if label else BAD)[int(i)] for i in torch.randint(5, (2,), generator=generator)]
        yield label, " ".join(words)


def collate_batch(batch):
    label_list, text_list, offsets = [], [], [0]
    for label, text in batch:
        label_list.append(label)
        tokens = torch.tensor([vocab[word] for word in text.split()], dtype=torch.int64)
        text_list.append(tokens)
        offsets.append(tokens.size(0))
    return torch.tensor(label_list), torch.cat(text_list), torch.tensor(offsets[:-1]).cumsum(dim=0)


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.weigh = nn.Embedding(vocab_size, 1)
        self.score = nn.Linear(1, 1)
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, mode="sum")
        self.fc = nn.Linear(embed_dim, num_class)

    def forward(self, text, offsets):
        weights = torch.sigmoid(self.score(self.weigh(text))).squeeze(1)
        return self.fc(self.embedding(text, offsets, per_sample_weights=weights))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
train = list(sentences(400, generator))
test = list(sentences(200, generator))
model = TextClassificationModel(len(vocab), 16, 2)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(4):
    for label, text, offsets in DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate_batch):
        optimizer.zero_grad()
        loss = criterion(model(text, offsets), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
correct = 0
with torch.no_grad():
    for label, text, offsets in DataLoader(test, batch_size=50, collate_fn=collate_batch):
        correct += (model(text, offsets).argmax(1) == label).sum().item()
print("accuracy", correct / len(test))
