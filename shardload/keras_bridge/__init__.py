"""The only code that knows Keras' private parts: variables, building without allocating, saving, training.

What each function relies on is pinned by tests/test_keras_contract.py against the Keras version named there.
"""
