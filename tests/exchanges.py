"""A bucket exchange that tests use as they use a reducer."""

from commlib.exchange import BucketExchange


class WholeExchange(BucketExchange):
    """Reduces a whole gradient at once. ``last``: the report of the latest step."""

    last = None

    def reduce(self, gradient, order=None):
        """Submit all buckets of a gradient, in an order; return the mean."""
        for number in range(len(self.sizes)) if order is None else order:
            self.submit(number, gradient[self.slices[number]])
        mean, self.last = self.wait()
        return mean


def whole_exchange(name, topology, sizes, *, overlap=False, **options):
    """Return an exchange with the reducer ``name``."""
    return WholeExchange(topology, sizes, {"name": name, **options}, overlap=overlap)
