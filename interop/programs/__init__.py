"""Programs that use the frameworks as their manuals do. None of them knows phalanx."""
