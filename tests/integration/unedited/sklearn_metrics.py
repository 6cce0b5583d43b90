"""Breast cancer data, judged by scikit-learn's metrics."""

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import average_precision_score, brier_score_loss, confusion_matrix, f1_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

torch.manual_seed(0)
X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
scaler = StandardScaler().fit(X_train)
X_train = torch.from_numpy(scaler.transform(X_train)).float()
X_test = torch.from_numpy(scaler.transform(X_test)).float()
y_train = torch.from_numpy(y_train).float().unsqueeze(1)

model = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
criterion = torch.nn.BCEWithLogitsLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(40):
    optimizer.zero_grad()
    loss = criterion(model(X_train), y_train)
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    probability = torch.sigmoid(model(X_test)).squeeze(1).numpy()
prediction = (probability > 0.5).astype(int)
print("dtype", probability.dtype)
print("auc", roc_auc_score(y_test, probability))
print("average precision", average_precision_score(y_test, probability))
print("brier", brier_score_loss(y_test, probability))
print("f1", f1_score(y_test, prediction))
print("right", np.trace(confusion_matrix(y_test, prediction)) / len(y_test))
