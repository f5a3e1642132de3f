"""Build models from configurations with KerasHub, and check that they compute what the configuration describes."""
