"""The only code of shardload that uses private functions and attributes of Keras.

tests/keras_bridge/test_keras_contract.py checks, for one version of Keras, what this code assumes about them.
"""

from typing import Any

Variable = Any
"""A ``keras.Variable``, as `Any`, because Keras has no type annotations."""
Model = Any
"""A ``keras.Model`` or layer, as `Any`, because Keras has no type annotations."""
