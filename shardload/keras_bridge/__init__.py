"""The only code that uses Keras' private parts: variables, building without allocating, saving, training.

tests/keras_bridge/test_keras_contract.py checks each function's assumptions against the Keras version named there.
"""

from typing import Any

Variable = Any
"""A ``keras.Variable``; untyped upstream."""
Model = Any
"""A ``keras.Model`` or layer; untyped upstream."""
