"""Other people's programs, unmodified, on torch and on phalanx, side by side: ``make interop``."""
