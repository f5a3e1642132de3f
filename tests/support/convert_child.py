"""A conversion in a process of its own, slowed down so that somebody can kill it.

python -m convert_child SOURCE TARGET FORMAT SECONDS_PER_TENSOR
"""

import sys
import time

import shardload
from shardload.converting.publishing import ConversionFolder

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed


def main(source, target, to, pause_s):
    noted = ConversionFolder.note_done

    def slowly(self, name, digest):
        noted(self, name, digest)
        time.sleep(pause_s)

    ConversionFolder.note_done = slowly
    shardload.convert(source, target, to=to)


if __name__ == "__main__":
    main(*sys.argv[1:4], float(sys.argv[4]))
