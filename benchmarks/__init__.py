"""The laboratory: races, validations, pictures and planted faults; of the repository, not of the wheel."""
