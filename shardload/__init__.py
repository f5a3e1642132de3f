"""Load any checkpoint straight into a sharded Keras model on JAX."""
