"""`python -m phalanx` is `phalanx`."""

from phalanx.launch.cli import main

main()
