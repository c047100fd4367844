"""S3KeysPartitioner: one partition an object, or lists or ranges of keys of about the same number of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.partitioners.base import BoundPartitioner, whole_number
from airflow_dbpartition.partitioners.packing import Sized, pack, partition_key_of

MOST_KEYS_IN_LISTS = 100_000  # some 10 MB while planning, and a few MiB of JSON in all


class S3KeysPartitioner(BoundPartitioner):
    """The objects of an S3 bucket below a prefix, listed page by page, weighed by their bytes.

    * **One partition for each object**, where neither `bins` nor `ranges` is given: the context is
      `{"bucket": …, "key": …, "size": bytes}`. For up to some ten thousand objects.
    * **Lists of keys** (`bins`), balanced by bytes, the largest object first: `{"bucket": …, "keys": [...],
      "size": bytes}`. For up to 100,000 objects; more are refused.
    * **Ranges of keys** (`ranges`), one behind the other in the order of the keys, balanced by bytes: `{"bucket": …,
      "prefix": …, "suffix": …, "min_size_bytes": …, "start_after": …, "last_key": …, "objects": number,
      "size": bytes}`. For any number: the listing is read once, and neither planning nor a context grows with it. The
      step lists its range again; what has come into it meanwhile belongs to it.

    In a step `s3_keys(ctx.context, client)` of `airflow_dbpartition.worker` yields the keys, whichever of these it is.
    The empty objects that the console makes for a folder (`…/`) are left out. No matching object is no partition.

    Args:
        bucket: the bucket's name.
        prefix: what the keys begin with; "" = all of the bucket.
        suffix: what the keys end with, such as ".parquet", or a list of such; None = anything.
        bins: number of lists (or "grid": the grid size); there are never more than objects.
        ranges: number of ranges (or "grid": the grid size); instead of bins. There may be fewer, where an object is
            heavier than a range should be.
        min_size_bytes: objects of fewer bytes are left out; 1 leaves out the empty ones.
        required: fail when no object matches, where otherwise the step ends well with no partitions.
        conn_id: Airflow connection of type aws; None = the credentials that boto3 finds in Airflow's environment.
        context: further values for the context of every partition.
    """

    template_fields: ClassVar[Sequence[str]] = (
        "bucket",
        "prefix",
        "suffix",
        "bins",
        "ranges",
        "min_size_bytes",
        "required",
        "conn_id",
        "context",
    )

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        suffix: str | Sequence[str] | None = None,
        bins: int | str | None = None,
        ranges: int | str | None = None,
        min_size_bytes: int | str = 0,
        required: bool | str = False,
        conn_id: str | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self._required(bucket=bucket)
        self.bucket = bucket
        self.prefix = prefix
        self.suffix = suffix
        self.bins = bins
        self.ranges = ranges
        self.min_size_bytes = min_size_bytes
        self.required = required
        self.conn_id = conn_id
        self.context = context

    def partition(self, grid_size: int) -> Iterator[Partition]:
        bins, ranges = self._bins(self.bins, grid_size), self._bins(self.ranges, grid_size, name="ranges")
        if bins is not None and ranges is not None:
            raise self._error(f"expected bins or ranges, got both ({self.bins!r} and {self.ranges!r})")
        listing = _Listing(self)
        if ranges is not None:
            yield from self._ranges(listing, ranges)
        elif bins is not None:
            yield from self._lists(listing, bins)
        else:
            yield from self._single(listing)
        if not listing.count and self._flag("required"):
            raise self._error(
                f"no object matches in bucket {listing.bucket!r} below {listing.prefix!r}; "
                "with required=False that is no error"
            )

    def _single(self, listing: _Listing) -> Iterator[Partition]:
        folder = listing.prefix.rpartition("/")
        for key, size_bytes in listing:
            context = self._context({"bucket": listing.bucket, "key": key, "size": size_bytes})
            name = partition_key_of(key.removeprefix(folder[0] + folder[1]))
            yield Partition(name, context, weight=size_bytes)

    def _lists(self, listing: _Listing, bins: int) -> Iterator[Partition]:
        objects: list[Sized] = []
        for key, size_bytes in listing:
            if len(objects) == MOST_KEYS_IN_LISTS:
                raise self._error(
                    f"more than {MOST_KEYS_IN_LISTS:,} objects in bucket {listing.bucket!r} below {listing.prefix!r} "
                    "are too many for lists of keys: give ranges= instead of bins="
                )
            objects.append(Sized(key, key, size_bytes))
        for index, packed in enumerate(pack(objects, bins)):
            size_bytes = sum(item.size_bytes for item in packed)
            context = {"bucket": listing.bucket, "keys": [item.place for item in packed], "size": size_bytes}
            yield Partition(f"bin{index}", self._context(context), weight=size_bytes)

    def _ranges(self, listing: _Listing, ranges: int) -> Iterator[Partition]:
        stretches = _Stretches(ranges)
        before: str | None = None
        for key, size_bytes in listing:
            if before is not None and key <= before:
                raise self._error(
                    f"bucket {listing.bucket!r} does not list its keys in order ({key!r} came after {before!r}), as "
                    "directory buckets do not: give bins= instead of ranges="
                )
            before = key
            stretches.add(key, size_bytes)
        start_after: str | None = None
        for index, found in enumerate(stretches.cut(ranges)):
            context = {
                "bucket": listing.bucket,
                "prefix": listing.prefix,
                "suffix": list(listing.suffixes),
                "min_size_bytes": listing.min_size_bytes,
                "start_after": start_after,
                "last_key": found.last_key,
                "objects": found.objects,
                "size": found.size_bytes,
            }
            yield Partition(f"range{index}", self._context(context), weight=found.size_bytes)
            start_after = found.last_key


class _Listing:
    """The objects that match, counted while they are read."""

    def __init__(self, spec: S3KeysPartitioner) -> None:
        self.count = 0
        self.bucket = spec._text("bucket")
        self.prefix = spec._optional_text("prefix") or ""
        self.suffixes = _suffixes(spec)
        self.min_size_bytes = whole_number("min_size_bytes", spec.min_size_bytes, least=0, owner=type(spec).__name__)
        self._objects = spec.environment.s3_objects
        self._conn_id = spec._optional_text("conn_id")

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for key, size_bytes in self._objects(self.bucket, self.prefix, self._conn_id):
            if is_wanted(key, size_bytes, suffixes=self.suffixes, min_size_bytes=self.min_size_bytes):
                self.count += 1
                yield key, size_bytes


def is_wanted(key: str, size_bytes: int, *, suffixes: tuple[str, ...], min_size_bytes: int) -> bool:
    """Whether an object matches; what stands for a folder never does."""
    if size_bytes < min_size_bytes or (size_bytes == 0 and key.endswith("/")):
        return False
    return not suffixes or key.endswith(suffixes)


def _suffixes(spec: S3KeysPartitioner) -> tuple[str, ...]:
    given = spec.suffix
    several = [given] if isinstance(given, str) else list(given or ())
    if not all(isinstance(suffix, str) for suffix in several):
        raise spec._error(f"expected suffix to be text or a list of texts, got {given!r}")
    return tuple(suffix for suffix in several if suffix)


class _Stretch(NamedTuple):
    """Neighbouring objects: from behind the stretch before up to `last_key`."""

    last_key: str
    size_bytes: int
    objects: int
    load: int  # bytes, where an empty object weighs one

    def joined(self, following: _Stretch) -> _Stretch:
        return _Stretch(
            following.last_key,
            self.size_bytes + following.size_bytes,
            self.objects + following.objects,
            self.load + following.load,
        )


class _Stretches:
    """A listing in bounded memory: when there are too many stretches, the light ones are joined with their neighbours.

    A stretch of several objects never weighs more than 1/16 of what a range will, so the ranges stay balanced.
    """

    _FOR_EACH_RANGE = 64

    def __init__(self, ranges: int) -> None:
        self._limit = self._FOR_EACH_RANGE * ranges
        self._stretches: list[_Stretch] = []
        self._load = 0

    def __len__(self) -> int:
        return len(self._stretches)

    def add(self, key: str, size_bytes: int) -> None:
        load = max(size_bytes, 1)
        self._load += load
        self._stretches.append(_Stretch(key, size_bytes, 1, load))
        if len(self._stretches) > self._limit:
            self._join_light_ones()

    def _join_light_ones(self) -> None:
        """Two neighbours that are left weigh more than `most` together, so half of the limit is left at the most."""
        most = 4 * self._load // self._limit
        joined: list[_Stretch] = []
        for stretch in self._stretches:
            if joined and joined[-1].load + stretch.load <= most:
                joined[-1] = joined[-1].joined(stretch)
            else:
                joined.append(stretch)
        self._stretches = joined

    def cut(self, ranges: int) -> Iterator[_Stretch]:
        """At most so many ranges: each stretch goes to the one where its middle falls."""
        at, current, passed = -1, None, 0
        for stretch in self._stretches:
            middle = 2 * passed + stretch.load
            passed += stretch.load
            place = middle * ranges // (2 * self._load)
            if current is not None and place == at:
                current = current.joined(stretch)
                continue
            if current is not None:
                yield current
            at, current = place, stretch
        if current is not None:
            yield current
