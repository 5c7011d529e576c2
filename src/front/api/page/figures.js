// Rates, means and quantiles from two snapshots of the metrics, computed as `trireme top` does.

/** All samples of a metric that belong to a model; all of them without `model`. */
export function samples(metrics, name, model) {
  const all = metrics?.[name] ?? [];
  return model === undefined ? all : all.filter((sample) => sample.labels.model === model);
}

/** The sum of a metric over its samples; null if there are none. */
export function sum(metrics, name, model, filter = () => true) {
  const found = samples(metrics, name, model).filter(filter);
  return found.length ? found.reduce((total, sample) => total + (sample.value ?? 0), 0) : null;
}

/** What a counter grew by per second between two snapshots. After a restart counters begin at 0; no rate is negative. */
export function rate(before, now, name, model, filter) {
  const seconds = (now.at - before.at) / 1000;
  const grown = (sum(now.metrics, name, model, filter) ?? 0) - (sum(before.metrics, name, model, filter) ?? 0);
  return seconds > 0 ? Math.max(grown, 0) / seconds : 0;
}

/** A histogram of what was observed between two snapshots; null if nothing was. */
export function observed(before, now, name, model) {
  const late = joined(samples(now.metrics, name, model));
  if (!late) return null;
  const early = joined(samples(before.metrics, name, model));
  const isRestart = !early || early.count > late.count || early.counts.length !== late.counts.length;
  const counts = isRestart ? late.counts : late.counts.map((count, at) => count - early.counts[at]);
  const count = isRestart ? late.count : late.count - early.count;
  return count > 0 ? { bounds: late.bounds, counts, count, sum: isRestart ? late.sum : late.sum - early.sum } : null;
}

function joined(histograms) {
  if (!histograms.length || !histograms[0].counts) return null;
  const [first, ...others] = histograms;
  const total = { bounds: first.bounds, counts: [...first.counts], count: first.count, sum: first.sum };
  for (const other of others) {
    other.counts.forEach((count, at) => (total.counts[at] += count));
    total.count += other.count;
    total.sum += other.sum;
  }
  return total;
}

/** A quantile of a histogram, linear within a bucket, as Prometheus' `histogram_quantile` has it; null without observations. */
export function quantile(histogram, share) {
  if (!histogram) return null;
  const rank = share * histogram.count;
  const at = histogram.counts.findIndex((count) => count >= rank);
  const upper = histogram.bounds[at];
  const lower = at > 0 ? histogram.bounds[at - 1] : 0;
  if (upper === null || upper === undefined) return lower;
  const below = at > 0 ? histogram.counts[at - 1] : 0;
  const inside = histogram.counts[at] - below;
  return inside > 0 ? lower + ((upper - lower) * (rank - below)) / inside : upper;
}

export const mean = (histogram) => (histogram ? histogram.sum / histogram.count : null);

/** `-` for null, else the number with few digits. */
export function number(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  const places = value >= 100 || Number.isInteger(value) ? 0 : digits;
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

/** A duration in seconds as `12.3 ms` or `1.25 s`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${number(seconds * 1000)} ms` : `${number(seconds, 2)} s`;
}

/** `512 MiB`, `3.2 GiB`. */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  return count < 2 ** 30 ? `${number(count / 2 ** 20, 0)} MiB` : `${number(count / 2 ** 30)} GiB`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${number(100 * share, share < 0.1 ? 1 : 0)} %`);
