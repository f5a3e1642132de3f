"""Models from configurations, by KerasHub, and whether they compute what the configuration says."""
