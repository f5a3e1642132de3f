"""The imports that are allowed between packages."""

_ALLOWED = {
    "errors": "",
    "interrupts": "",
    "typing": "",
    "units": "errors",
    "families": "errors units",
    "sharding": "errors typing units",
    "stores": "errors units",
    "reports": "sharding units",
    "manifest": "errors reports stores units",
    "progress": "errors reports units",
    "loaders": "errors families manifest stores units",
    "processes": "errors progress sharding",
    "transfer": "errors manifest sharding stores units",
    "keras_bridge": "errors manifest processes reports sharding stores transfer units",
    "data": "errors keras_bridge units",
    "hub": "errors families keras_bridge loaders manifest stores transfer units",
    "layouts": "errors keras_bridge reports sharding typing units",
    "optimizers": "errors keras_bridge reports sharding units",
    "layout_search": "errors keras_bridge layouts reports sharding stores typing units",
    "mapping": "errors families hub keras_bridge layouts loaders manifest reports sharding stores transfer units",
    "layout_checks": "errors keras_bridge layout_search layouts reports sharding stores transfer units",
    "runs": "errors interrupts keras_bridge loaders manifest mapping processes reports stores units",
    "parallel": "errors keras_bridge layout_checks layout_search layouts sharding typing units",
    "resolve": "errors families hub loaders manifest runs stores units",
    "pipeline": "errors hub keras_bridge layout_search layouts loaders manifest mapping optimizers parallel "
    "processes progress reports resolve sharding stores transfer typing units",
    "synth": "errors families hub keras_bridge loaders progress resolve stores units",
    "text": "errors families hub keras_bridge loaders manifest resolve stores typing units",
    "verifying": "errors loaders manifest progress reports resolve runs stores transfer units",
    "converting": "errors families hub interrupts keras_bridge loaders manifest mapping pipeline processes progress "
    "reports resolve runs sharding stores text transfer typing units",
    "restoring": "errors keras_bridge loaders manifest mapping pipeline processes progress reports resolve runs "
    "transfer typing",
    "serving": "errors loaders reports runs sharding stores units verifying",
    "adapting": "converting errors keras_bridge pipeline reports resolve typing units",
    "callbacks": "data errors keras_bridge pipeline processes reports restoring runs stores typing units",
    "comparing": "converting errors loaders manifest progress reports resolve transfer units",
    "following": "errors interrupts keras_bridge pipeline processes restoring runs typing units",
    "loading": "adapting converting errors keras_bridge manifest pipeline processes progress reports resolve text "
    "typing",
    "accelerating": "errors keras_bridge layouts loaders loading mapping pipeline reports resolve sharding stores text",
    "console": "comparing converting errors hub interrupts loaders loading manifest pipeline processes progress "
    "reports resolve runs serving sharding stores synth text units verifying",
    "cli": "console interrupts stores",
    "__main__": "cli",
}
EDGES = {package: set(names.split()) for package, names in _ALLOWED.items()}
"""Package → the packages that it may import, below it in the layers."""
