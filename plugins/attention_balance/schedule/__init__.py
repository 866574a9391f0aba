"""Who trains which sample when: dealing samples to ranks and micro-batches, and how long a step then takes."""
