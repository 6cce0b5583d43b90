"""Recurrent networks with the names and the state dict of `apex.RNN`.

A network goes on from the hidden state of its last call. Between two steps of training call ``detach_hidden()``, so
that the backward pass ends there, or ``reset_hidden(batch_size)``, to begin from zeros.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.errors import UsageError


class RNNCell(Module):
    """One layer: the weights, the hidden state, and what happens at one time step.

    The weights are ``w_ih`` of shape ``(gates * hidden_size, input_size)``, ``w_hh`` of ``(gates * hidden_size,
    hidden_size)``, and ``b_ih`` and ``b_hh`` of ``(gates * hidden_size,)``.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the hidden state.
        bias: Whether there are biases.

    Attributes:
        hidden: The tensors of the hidden state, shape ``(batch, features)``, or None before the first call.
    """

    # How many gates (the rows of the weights count in them), and how many tensors the hidden state has.
    gates = 1
    n_hidden_states = 1

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.hidden: tuple[Tensor, ...] | None = None
        rows = self.gates * hidden_size
        self.w_ih = Parameter(torch.empty(rows, input_size))
        self.w_hh = Parameter(torch.empty(rows, hidden_size))
        self.b_ih = Parameter(torch.empty(rows)) if bias else None
        self.b_hh = Parameter(torch.empty(rows)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from U(-1 / sqrt(hidden_size), 1 / sqrt(hidden_size))."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Begin from zeros unless there is a hidden state of this batch size on the parameters' device."""
        # Not `w_ih`: where a hook computes it, as for weight norm, it may lie where the parameters were before.
        like, now = next(self.parameters()).detach(), self.hidden
        if now is None or now[0].shape[0] != bsz or now[0].device != like.device:
            self.hidden = tuple(like.new_zeros(bsz, self.hidden_size) for _ in range(self.n_hidden_states))

    def forward(self, input: Tensor, reverse: bool = False) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Run over a sequence.

        Args:
            input: Shape ``(time, batch, input_size)``.
            reverse: Whether to go from the last time step to the first.

        Returns:
            The outputs, shape ``(time, batch, hidden_size)``, and the hidden state after each time step. Both are in
            the order of time.
        """
        self.init_hidden(input.shape[1])
        # The input's part of the gates does not depend on the hidden state: one product for all time steps.
        projected = self.project(input)
        places = range(input.shape[0])
        assert self.hidden is not None
        # The model may have been cast since the last call.
        hidden = (self.hidden[0].to(projected[0].dtype), *self.hidden[1:])
        states = []
        for place in reversed(places) if reverse else places:
            hidden = self.advance(tuple(part[place] for part in projected), hidden)
            states.append(hidden)
        self.hidden = hidden
        if reverse:
            states.reverse()
        return torch.stack([state[0] for state in states]), states

    def project(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return what is computed from the input alone: tensors of shape ``(time, batch, features)``."""
        return (F.linear(input, self.w_ih, self.b_ih),)

    def advance(self, projected: tuple[Tensor, ...], hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the next hidden state, the output first, from one time step of `project`'s tensors and the last state.

        All shapes are ``(batch, features)``.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        # The hidden state is a part of autograd's graph, and such a tensor cannot be deep-copied.
        return {**self.__dict__, "hidden": None}

    def extra_repr(self) -> str:
        """Say what the constructor was given."""
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}"


class ReLUCell(RNNCell):
    """``h' = relu(W_ih x + b_ih + W_hh h + b_hh)``."""

    def advance(self, projected: tuple[Tensor, ...], hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `RNNCell.advance`."""
        return (torch.relu(projected[0] + F.linear(hidden[0], self.w_hh, self.b_hh)),)


class TanhCell(RNNCell):
    """The network of Elman 1990: ``h' = tanh(W_ih x + b_ih + W_hh h + b_hh)``."""

    def advance(self, projected: tuple[Tensor, ...], hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `RNNCell.advance`."""
        return (torch.tanh(projected[0] + F.linear(hidden[0], self.w_hh, self.b_hh)),)


class GRUCell(RNNCell):
    """The gated recurrent unit of Cho et al. 2014 (arXiv:1406.1078), with the formula of `torch.nn.GRU`."""

    gates = 3

    def advance(self, projected: tuple[Tensor, ...], hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `RNNCell.advance`."""
        input_reset, input_update, input_new = projected[0].chunk(3, -1)
        reset, update, new = F.linear(hidden[0], self.w_hh, self.b_hh).chunk(3, -1)
        candidate = torch.tanh(input_new + torch.sigmoid(input_reset + reset) * new)
        return (candidate + torch.sigmoid(input_update + update) * (hidden[0] - candidate),)


class LSTMCell(RNNCell):
    """The LSTM of Hochreiter and Schmidhuber 1997, as in `torch.nn.LSTM`."""

    gates = 4
    n_hidden_states = 2

    def advance(self, projected: tuple[Tensor, ...], hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `RNNCell.advance`."""
        return _lstm(projected[0] + F.linear(hidden[0], self.w_hh, self.b_hh), hidden[1])


class mLSTMCell(LSTMCell):
    """The multiplicative LSTM: Krause et al. 2016 (arXiv:1609.07959).

    ``m = (W_mih x) * (W_mhh h)`` stands for ``h`` in the gates. ``w_mih`` has the shape ``(hidden_size, input_size)``,
    ``w_mhh`` ``(hidden_size, hidden_size)``.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias)
        self.w_mih = Parameter(torch.empty(hidden_size, input_size))
        self.w_mhh = Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def project(self, input: Tensor) -> tuple[Tensor, ...]:
        """See `RNNCell.project`."""
        return (*super().project(input), F.linear(input, self.w_mih))

    def advance(self, projected: tuple[Tensor, ...], hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `RNNCell.advance`."""
        product = projected[1] * F.linear(hidden[0], self.w_mhh)
        return _lstm(projected[0] + F.linear(product, self.w_hh, self.b_hh), hidden[1])


def _lstm(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next hidden state, in the gates' dtype, and the next cell state, in the wider one of the two."""
    enter, forget, new, leave = gates.chunk(4, -1)
    following = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return (torch.sigmoid(leave) * torch.tanh(following)).to(gates.dtype), following


class _Network(Module):
    """What is asked of a network and done to each of its cells."""

    def init_hidden(self, bsz: int) -> None:
        """Begin from zeros where there is no hidden state for this batch size."""
        for cell in self._cells():
            cell.init_hidden(bsz)

    def reset_hidden(self, bsz: int) -> None:
        """Begin from zeros."""
        for cell in self._cells():
            cell.hidden = None
            cell.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Cut the hidden state from the graph that computed it, and go on from its values.

        Raises:
            UsageError: There is no hidden state yet.
        """
        for cell in self._cells():
            if cell.hidden is None:
                raise UsageError("there is no hidden state to detach; call the network, or reset_hidden(batch), first")
            cell.hidden = tuple(state.detach() for state in cell.hidden)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for cell in self._cells():
            cell.reset_parameters()

    def _cells(self) -> list[RNNCell]:
        return [module for module in self.modules() if isinstance(module, RNNCell)]


def _cell_like(cell: RNNCell, input_size: int) -> RNNCell:
    """Return a new cell of the same kind and sizes, but for ``input_size``."""
    return type(cell)(input_size, cell.hidden_size, cell.bias)


class stackedRNN(_Network):
    """Layers of one kind of cell; each runs on the output of the one before. The cells are ``rnns.0``, ``rnns.1``, ...

    Args:
        inputRNN: The first layer; the others are like it.
        num_layers: How many layers.
        dropout: The share of each layer's output, but the last one's, that dropout sets to 0 while training.
        batch_first: Whether input and output have the batch before the time.
    """

    def __init__(
        self, inputRNN: RNNCell, num_layers: int = 1, dropout: float = 0.0, batch_first: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.nLayers = num_layers
        self.dropout = dropout
        self.batch_first = batch_first
        others = [_cell_like(inputRNN, inputRNN.hidden_size) for _ in range(num_layers - 1)]
        self.rnns = torch.nn.ModuleList([inputRNN, *others])

    def forward(
        self, input: Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run over a sequence.

        Args:
            input: Shape ``(time, batch, input_size)``, or with ``batch_first`` ``(batch, time, input_size)``.
            collect_hidden: Whether to return the hidden state of all time steps.
            reverse: Whether to go from the last time step to the first.

        Returns:
            The last layer's output, shaped as the input, and the hidden state: one tensor, or two for an LSTM, of shape
            ``(layers, batch, features)`` after the step computed last; with ``collect_hidden`` of all steps,
            ``(time, layers, batch, features)``.

        Raises:
            UsageError: The input has not three dimensions, or one of them is 0.
        """
        if input.dim() != 3 or 0 in input.shape:
            raise UsageError(f"input of shape {tuple(input.shape)}; it must be (time, batch, features), none of them 0")
        output = input.transpose(0, 1) if self.batch_first else input
        layers = []
        for place, rnn in enumerate(self.rnns):
            if place and self.dropout:
                output = F.dropout(output, self.dropout, self.training)
            output, states = rnn(output, reverse)
            layers.append(states if collect_hidden else [states[0 if reverse else -1]])
        # For each kind of state and time step, the layers are stacked.
        kinds = range(len(layers[0][0]))
        times = range(len(layers[0]))
        found = [[torch.stack([layer[time][kind] for layer in layers]) for time in times] for kind in kinds]
        hidden = tuple(torch.stack(steps) if collect_hidden else steps[0] for steps in found)
        return output.transpose(0, 1) if self.batch_first else output, hidden


class bidirectionalRNN(_Network):
    """Two stacks, ``fwd`` and ``bckwrd``, that run over the sequence in both directions; their features are joined.

    Arguments as for `stackedRNN`.
    """

    def __init__(
        self, inputRNN: RNNCell, num_layers: int = 1, dropout: float = 0.0, batch_first: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = dropout
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first)
        self.bckwrd = stackedRNN(_cell_like(inputRNN, inputRNN.input_size), num_layers, dropout, batch_first)

    def forward(self, input: Tensor, collect_hidden: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run over a sequence; see `stackedRNN.forward`. The features of both directions follow one another."""
        output, hidden = self.fwd(input, collect_hidden)
        back_output, back_hidden = self.bckwrd(input, collect_hidden, reverse=True)
        joined = tuple(torch.cat(pair, -1) for pair in zip(hidden, back_hidden, strict=True))
        return torch.cat([output, back_output], -1), joined


def _maker(cell: type[RNNCell], name: str) -> Any:
    """Return the function ``name`` of `apex.RNN`, which makes a network of these cells."""

    def make(
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> stackedRNN | bidirectionalRNN:
        if output_size not in (None, hidden_size):
            raise UsageError(
                f"{name}: output_size={output_size} is not supported; leave it out, or use torch.nn.LSTM(proj_size=...)"
            )
        network = bidirectionalRNN if bidirectional else stackedRNN
        return network(cell(input_size, hidden_size, bias), num_layers, dropout, batch_first)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"""Return layers of `{cell.__name__}`: a `stackedRNN`, or a `bidirectionalRNN` if so asked."""
    return make


LSTM = _maker(LSTMCell, "LSTM")
GRU = _maker(GRUCell, "GRU")
ReLU = _maker(ReLUCell, "ReLU")
Tanh = _maker(TanhCell, "Tanh")
mLSTM = _maker(mLSTMCell, "mLSTM")
