"""The stages of a load, in one process or several; `shardload.pipeline.load` has their order on one page."""
