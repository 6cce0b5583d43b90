"""Semi-supervised learning: a deep copy that follows as an average, pseudo labels behind a mask of confidence."""

import copy

import torch
import torch.nn.functional as F

torch.manual_seed(0)
centers = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.5]])
labels = torch.randint(3, (300,))
x = centers[labels] + 0.5 * torch.randn(300, 2)
known = torch.zeros(300, dtype=torch.bool)
known[:30] = True
student = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.Adam(student.parameters(), lr=2e-2)
pseudo = torch.zeros(300, 3)
for step in range(60):
    with torch.no_grad():
        probabilities = teacher(x).softmax(1)
        pseudo[~known] = probabilities[~known]
        pseudo[known] = F.one_hot(labels[known], 3).float()
    confident = pseudo.max(1).values > 0.8
    loss = F.cross_entropy(student(x[known]), labels[known])
    if confident.any():
        noisy = student(x[confident] + 0.1 * torch.randn_like(x[confident]))
        loss = loss + F.kl_div(noisy.log_softmax(1), pseudo[confident], reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters()):
            slow.mul_(0.9).add_(fast, alpha=0.1)
print("accuracy", (teacher(x).argmax(1) == labels).float().mean().item())
print("confident", confident.float().mean().item(), pseudo.dtype)
