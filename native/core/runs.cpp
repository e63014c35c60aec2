#include "core/runs.hpp"

namespace pagoda {

namespace {
constexpr int64_t kChunkTokens = 64;

// A chunk of the usual page size has four ids, too few for a call to memcpy, and a decode step stores one.
void copy_ids(const int32_t* ids, int64_t n, int32_t* out) {
  if (n == 1) {
    *out = *ids;
  } else if (n == 4) {
    std::memcpy(out, ids, 4 * sizeof(int32_t));
  } else {
    std::memcpy(out, ids, static_cast<size_t>(n) * sizeof(int32_t));
  }
}

}  // namespace

RunStore::RunStore(int64_t page_tokens, int num_columns, int64_t capacity)
    : math_(page_tokens),
      num_columns_(num_columns),
      chunk_pages_(std::max<int64_t>(1, kChunkTokens / page_tokens)),
      chunk_tokens_(chunk_pages_ * page_tokens) {
  if (capacity == 0) return;
  const int64_t chunks = capacity / chunk_tokens_;
  tokens_.commit(chunks * chunk_tokens_);
  ids_.commit(chunks * num_columns_ * chunk_pages_);
  next_.commit(chunks);
  prev_.commit(chunks);
}

void RunStore::reserve(int64_t n) {
  const int64_t fresh = n - num_free_;
  if (fresh > 0) expect((num_chunks() + fresh) * chunk_tokens_);
}

void RunStore::expect(int64_t tokens) {
  const int64_t chunks = (tokens + chunk_tokens_ - 1) / chunk_tokens_;
  tokens_.reserve(chunks * chunk_tokens_);
  ids_.reserve(chunks * num_columns_ * chunk_pages_);
  next_.reserve(chunks);
  prev_.reserve(chunks);
  if (has_keys_) keys_.reserve(chunks * chunk_pages_);
}

void RunStore::keep_keys() {
  if (has_keys_) return;
  keys_.reserve(num_chunks() * chunk_pages_);
  keys_.extend(num_chunks() * chunk_pages_);
  has_keys_ = true;
}

void RunStore::drop_keys() {
  keys_.free();
  has_keys_ = false;
}

int32_t RunStore::take() {
  if (free_ >= 0) {
    const int32_t chunk = free_;
    free_ = next_[chunk];
    --num_free_;
    return chunk;
  }
  const int64_t chunk = num_chunks();
  tokens_.extend(chunk_tokens_);
  ids_.extend(num_columns_ * chunk_pages_);
  next_.extend(1);
  prev_.extend(1);
  if (has_keys_) keys_.extend(chunk_pages_);
  return static_cast<int32_t>(chunk);
}

void RunStore::give(int32_t chunk) {
  next_[chunk] = free_;
  free_ = chunk;
  ++num_free_;
}

int32_t RunStore::chunk_at(const Run& run, int64_t at) const {
  int64_t hops = (run.offset + at) / chunk_tokens_;
  const int64_t last = (run.offset + run.length - 1) / chunk_tokens_;
  if (hops <= last / 2) {
    int32_t chunk = run.head;
    while (hops-- > 0) chunk = next_[chunk];
    return chunk;
  }
  int32_t chunk = run.tail;
  for (hops = last - hops; hops > 0; --hops) chunk = prev_[chunk];
  return chunk;
}

void RunStore::append(Run& run, const int32_t* tokens, const std::vector<const int32_t*>& columns, int64_t n) {
  int64_t done = 0;
  while (done < n) {
    int64_t used = (run.offset + run.length) % chunk_tokens_;
    if (run.length == 0) {
      run.head = run.tail = take();
      prev_[run.head] = next_[run.head] = -1;
      run.offset = 0;
      used = 0;
    } else if (used == 0) {
      const int32_t chunk = take();
      next_[run.tail] = chunk;
      prev_[chunk] = run.tail;
      next_[chunk] = -1;
      run.tail = chunk;
    }
    const int64_t piece = std::min(chunk_tokens_ - used, n - done);
    std::memcpy(tokens_.data() + run.tail * chunk_tokens_ + used, tokens + done,
                static_cast<size_t>(piece) * sizeof(int32_t));
    const int64_t from = math_.page(done), pages = math_.page(piece);
    int32_t* ids = const_cast<int32_t*>(ids_of(0, run.tail)) + math_.page(used);
    for (const int32_t* column : columns) {
      copy_ids(column + from, pages, ids);
      ids += chunk_pages_;
    }
    run.length += static_cast<int32_t>(piece);
    done += piece;
  }
}

void RunStore::copy_rest(int32_t from, int32_t to, int64_t offset) {
  std::memcpy(tokens_.data() + to * chunk_tokens_ + offset, tokens_.data() + from * chunk_tokens_ + offset,
              static_cast<size_t>(chunk_tokens_ - offset) * sizeof(int32_t));
  const int64_t page = math_.page(offset);
  for (int c = 0; c < num_columns_; ++c) {
    std::memcpy(const_cast<int32_t*>(ids_of(c, to)) + page, ids_of(c, from) + page,
                static_cast<size_t>(chunk_pages_ - page) * sizeof(int32_t));
  }
  if (has_keys_) {
    std::memcpy(keys_.data() + to * chunk_pages_ + page, keys_.data() + from * chunk_pages_ + page,
                static_cast<size_t>(chunk_pages_ - page) * sizeof(uint64_t));
  }
}

Run RunStore::split(Run& run, int64_t at) {
  const int32_t chunk = chunk_at(run, at);
  const int64_t offset = (run.offset + at) % chunk_tokens_;
  Run rest{chunk, run.tail, static_cast<int32_t>(offset), static_cast<int32_t>(run.length - at)};
  if (offset == 0) {
    run.tail = prev_[chunk];
    prev_[chunk] = -1;
  } else {
    // Both halves are in this chunk: the rest gets its own chunk, with its tokens at the same offset.
    const int32_t copy = take();
    copy_rest(chunk, copy, offset);
    prev_[copy] = -1;
    next_[copy] = next_[chunk];
    if (next_[chunk] >= 0) prev_[next_[chunk]] = copy;
    rest.head = copy;
    if (run.tail == chunk) rest.tail = copy;
    run.tail = chunk;
  }
  next_[run.tail] = -1;
  run.length = static_cast<int32_t>(at);
  return rest;
}

Run RunStore::join(const Run& upper, const Run& lower) {
  int32_t rest = lower.head, tail = lower.tail;
  if (lower.offset != 0) {  // both are in one chunk again
    copy_rest(lower.head, upper.tail, lower.offset);
    rest = next_[lower.head];
    if (lower.tail == lower.head) tail = upper.tail;
    give(lower.head);
  }
  next_[upper.tail] = rest;
  if (rest >= 0) prev_[rest] = upper.tail;
  return {upper.head, tail, upper.offset, upper.length + lower.length};
}

void RunStore::trim(Run& run, int64_t length) {
  // Last chunk first, so that they are reused in their old order.
  int64_t keep = length == 0 ? 0 : (run.offset + length - 1) / chunk_tokens_ + 1;
  int64_t have = (run.offset + run.length + chunk_tokens_ - 1) / chunk_tokens_;
  for (; have > keep; --have) {
    const int32_t chunk = run.tail;
    run.tail = prev_[chunk];
    give(chunk);
  }
  if (length > 0) {
    next_[run.tail] = -1;
    run.length = static_cast<int32_t>(length);
  } else {
    run = Run{};
  }
}

void RunStore::copy_tokens(const Run& run, int64_t begin, int64_t end, int32_t* out) const {
  for_tokens(run, begin, end, [&](const int32_t* tokens, int64_t n) {
    std::memcpy(out, tokens, static_cast<size_t>(n) * sizeof(int32_t));
    out += n;
  });
}

void RunStore::copy_pages(const Run& run, int column, int64_t begin, int64_t end, int32_t* out) const {
  for_pages(run, column, begin, end, [&](const int32_t* ids, int64_t n) {
    copy_ids(ids, n, out);
    out += n;
  });
}

bool RunStore::mark(const Run& run, std::vector<bool>& seen) const {
  int32_t chunk = run.head, before = -1;
  int64_t length = -run.offset;
  if (run.offset < 0 || run.offset >= chunk_tokens_ || run.length <= 0) return false;
  for (; chunk >= 0; chunk = next_[chunk]) {
    if (chunk >= num_chunks() || seen[chunk] || prev_[chunk] != before) return false;
    seen[chunk] = true;
    before = chunk;
    length += chunk_tokens_;
  }
  return before == run.tail && length >= run.length && length - run.length < chunk_tokens_;
}

bool RunStore::free_chunks_are_right(std::vector<bool>& seen) const {
  int64_t n = 0;
  for (int32_t chunk = free_; chunk >= 0; chunk = next_[chunk], ++n) {
    if (seen[chunk]) return false;
    seen[chunk] = true;
  }
  return n == num_free_ && std::find(seen.begin(), seen.end(), false) == seen.end();
}

void RunStore::clear() {
  tokens_.clear();
  ids_.clear();
  next_.clear();
  prev_.clear();
  keys_.clear();
  free_ = -1;
  num_free_ = 0;
}

}  // namespace pagoda
