"""The only code that uses Keras' private parts: variables, building without allocating, saving, training.

tests/test_keras_contract.py checks each function's assumptions against the Keras version named there.
"""
