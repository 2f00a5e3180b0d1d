"""Write the list that t_symbols.c includes: one line SYMBOL(name) for each function that the headers declare.

make_symbols.py HEADER... OUTPUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from check_abi import declared

*headers, output = map(Path, sys.argv[1:])
output.write_text("".join(f"SYMBOL({name})\n" for name in declared(headers)))
