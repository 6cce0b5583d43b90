"""`apex.mlp`: perceptrons."""

from autoamp.apex.mlp.mlp import MLP, MlpFunction, mlp_function
