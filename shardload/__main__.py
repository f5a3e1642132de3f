"""`python -m shardload`, for environments where the `shardload` script is not on the PATH."""

import sys

from shardload.cli import main

sys.exit(main())
