"""The only code that uses private parts of Keras: variables, building without allocating, saving, training.

tests/keras_bridge/test_keras_contract.py names a version of Keras, and checks what each function assumes about that
version.
"""

from typing import Any

Variable = Any
"""A ``keras.Variable``, as `Any`, because Keras has no type annotations."""
Model = Any
"""A ``keras.Model`` or layer, as `Any`, because Keras has no type annotations."""
