"""``python -m pycoli``, the same as the command ``pycoli``."""

import sys

from .cli import main

sys.exit(main())
