"""`python -m phalanx` runs the command line."""

from phalanx.launch.cli import main

main()
