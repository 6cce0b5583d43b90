"""Deep Q-learning with a replay buffer and a target network, on a walk of nine places."""

import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

Transition = namedtuple("Transition", "state action next_state reward")
PLACES = 9


def observe(place):
    state = np.zeros(PLACES, dtype=np.float32)
    state[place] = 1
    return state


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, size):
        return random.sample(self.memory, size)


random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
policy_net = nn.Sequential(nn.Linear(PLACES, 32), nn.ReLU(), nn.Linear(32, 2))
target_net = nn.Sequential(nn.Linear(PLACES, 32), nn.ReLU(), nn.Linear(32, 2))
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=5e-3, amsgrad=True)
memory = ReplayMemory(2000)
gamma, tau = 0.9, 0.05

for episode in range(30):
    place = np.random.randint(1, PLACES - 1)
    for t in range(12):
        state = torch.tensor(observe(place)).unsqueeze(0)
        if random.random() < 0.5:
            action = torch.tensor([[random.randrange(2)]])
        else:
            with torch.no_grad():
                action = policy_net(state).max(1).indices.view(1, 1)
        place += 1 if action.item() else -1
        done = place in (0, PLACES - 1)
        reward = torch.tensor([1.0 if place == PLACES - 1 else 0.0])
        memory.push(state, action, None if done else torch.tensor(observe(place)).unsqueeze(0), reward)
        if len(memory.memory) >= 32:
            batch = Transition(*zip(*memory.sample(32)))
            non_final = torch.tensor([s is not None for s in batch.next_state])
            values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
            next_values = torch.zeros(32)
            with torch.no_grad():
                next_values[non_final] = (
                    target_net(torch.cat([s for s in batch.next_state if s is not None])).max(1).values
                )
            expected = next_values * gamma + torch.cat(batch.reward)
            loss = F.smooth_l1_loss(values, expected.unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
            optimizer.step()
            state_dict = target_net.state_dict()
            for key, value in policy_net.state_dict().items():
                state_dict[key] = value * tau + state_dict[key] * (1 - tau)
            target_net.load_state_dict(state_dict)
        if done:
            break

places = torch.from_numpy(np.stack([observe(place) for place in range(1, PLACES - 1)]))
q = policy_net(places).detach().numpy()
print("goes right", (q.argmax(1) == 1).mean())
print("value beside the goal", float(q[-1, 1]))
