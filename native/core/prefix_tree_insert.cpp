// Storing. Everything that may fail comes first, then the changes to the tree.
#include <algorithm>

#include "core/prefix_tree.hpp"

namespace pagoda {

// An insert in progress. Positions: the lease covers [0, base); of the tokens given, [base, present) were cached before
// and [present, stored) are new.
struct PrefixTree::Insertion {
  const Sequence& sequence;
  const std::vector<Ids>& columns;
  Lease* lease;  // null if there is none
  int32_t from;  // the node it starts at; -1 if the namespace is new
  int64_t base;
  const int32_t* entries;  // the tokens given, as runs store them
  Place at{};              // where the sequence leaves what is cached
  int64_t present = 0;
  int64_t stored = 0;
  std::vector<Hole> holes{};        // that the given ids fill
  std::vector<Checkpoint> taken{};  // those at lengths that have none yet
  std::vector<uint64_t> keys{};     // of the new pages, while there are listeners
  std::vector<TreeEvent> news{};

  int64_t added() const { return stored - present; }
};

// The id given for a page of the sequence.
int32_t PrefixTree::given_id(const Insertion& job, int column, int64_t page) const {
  return job.columns[static_cast<size_t>(column)][page - math_.page(job.base)];
}

void PrefixTree::find_holes(Insertion& job) const {
  for (int32_t node : path_) {
    const Run& run = nodes_[node].run;
    const int64_t first = math_.page(nodes_[node].begin);
    const int64_t last = math_.page(std::min<int64_t>(nodes_[node].end(), job.present));
    for (int c = 0; c < num_columns(); ++c) {
      if (held(c, node) == math_.page(run.length)) continue;
      int64_t page = first;
      runs_.for_places(run, 0, last - first, [&](int32_t, int64_t place, int64_t n) {
        for (const int64_t end = place + n; place < end; ++place, ++page) {
          if (runs_.id_at(c, place) < 0 && given_id(job, c, page) >= 0) job.holes.push_back({node, c, page, place});
        }
      });
    }
  }
}

void PrefixTree::find_checkpoints(Insertion& job, const std::vector<Checkpoint>& checkpoints) const {
  for (const Checkpoint& checkpoint : checkpoints) {
    if (checkpoint.length <= job.present) {
      const int32_t node = climb({job.at.node, checkpoint.length}).node;
      const int64_t begin = nodes_[node].begin;
      if (begin + last_checkpoint(node, checkpoint.length - begin) == checkpoint.length) continue;
    }
    job.taken.push_back(checkpoint);
  }
}

__attribute__((noinline)) void PrefixTree::write_news(Insertion& job) const {
  const uint64_t before = job.from < 0 ? key_of_bytes(job.sequence.space) : key_at(job.at.node, job.present);
  job.keys.resize(static_cast<size_t>(math_.page(job.added())));
  make_keys(before, job.entries + (job.present - job.base), math_.page(job.added()), job.keys.data());
  if (job.from >= 0 && is_lost(job.from)) return;  // it cannot be found
  const std::string space(job.from < 0 ? job.sequence.space : std::string_view(space_of(job.from)));
  for (const Hole& hole : job.holes) {
    job.news.push_back(page_event(EventKind::kStored, hole, given_id(job, hole.column, hole.page)));
  }
  // First the checkpoints on pages that were cached, one event each; then the new run with its own.
  auto checkpoint = job.taken.begin();
  for (; checkpoint != job.taken.end() && checkpoint->length <= job.present; ++checkpoint) {
    job.news.push_back(checkpoint_event(EventKind::kStored, job.at.node, *checkpoint));
  }
  if (job.added() == 0) return;
  TreeEvent told{EventKind::kStored, false, space, job.present, before, job.keys};
  describe(told, job.entries + (job.present - job.base), job.added());
  for (const Ids& column : job.columns) {
    const int32_t* ids = column.data + math_.page(job.present - job.base);
    told.columns.emplace_back(ids, ids + math_.page(job.added()));
  }
  told.states.assign(checkpoint, job.taken.end());
  job.news.push_back(std::move(told));
}

bool PrefixTree::grows_in_place(const Insertion& job) const {
  if (job.from < 0) return false;
  const Node& node = nodes_[job.at.node];
  // The insert's own lease locks its node once; any other lock forbids growing in place.
  const int32_t own = job.lease != nullptr && job.lease->node == job.at.node ? 1 : 0;
  return !node.is_root() && node.end() == job.present && node.first_child < 0 && !node.is_trimmed && node.locks == own;
}

void PrefixTree::fill(const Insertion& job) {
  for (const Hole& hole : job.holes) {
    const int32_t id = runs_.id_at(hole.column, hole.place) = given_id(job, hole.column, hole.page);
    add_held(hole.node, hole.column, 1);
    const int set = set_of_.empty() ? -1 : set_of_[static_cast<size_t>(hole.column)];
    if (set >= 0) places_[static_cast<size_t>(set)][id] = static_cast<uint32_t>(hole.place);
  }
}

// Separate from `store`, which stays short while there are no listeners.
__attribute__((noinline)) void PrefixTree::store_keys(const Insertion& job, const Run& run) {
  const uint64_t* keys = job.keys.data();
  const int64_t end = math_.page(run.length);
  runs_.for_places(run, end - math_.page(job.added()), end, [&](int32_t, int64_t place, int64_t n) {
    std::copy(keys, keys + n, runs_.keys_at(place));
    keys += n;
  });
}

void PrefixTree::store(Insertion& job, bool grows) {
  int32_t node = job.at.node;
  if (!grows) {
    const int32_t parent = job.from < 0 ? find_or_make_root(job.sequence.space) : end_at(job.at);
    node = new_node(parent, job.present);
  }
  const int64_t added = job.added();
  const int32_t* entries = job.entries + (job.present - job.base);
  runs_.append(nodes_[node].run, entries, new_ids_, added);
  if (!set_of_.empty())
    note_places(node, math_.page(nodes_[node].run.length - added), math_.page(nodes_[node].run.length));
  if (is_listened_) store_keys(job, nodes_[node].run);
  if (!extra_keys_.empty()) extra_keys_.add(entries, added);
  tokens_.total += added;
  if (nodes_[node].locks > 0) tokens_.locked += added;
  for (int c = 0; c < num_columns(); ++c) {
    if (!is_window(c)) continue;
    const int32_t* ids = new_ids_[static_cast<size_t>(c)];
    add_held(node, c, std::count_if(ids, ids + math_.page(added), [](int32_t id) { return id >= 0; }));
  }
  if (!grows) {
    link(node);
    order_.add(node);
  }
  job.at = {node, job.stored};
}

void PrefixTree::add_checkpoints(const Insertion& job) {
  for (const Checkpoint& checkpoint : job.taken) {
    const int32_t node = climb({job.at.node, checkpoint.length}).node;
    auto& all = checkpoints_[static_cast<size_t>(node)];
    all.insert(std::find_if(all.begin(), all.end(), [&](const Checkpoint& c) { return c.length > checkpoint.length; }),
               checkpoint);
    most_checkpoints_ = std::max(most_checkpoints_, all.size());
    ++states_.total;
    if (nodes_[node].locks > 0) ++states_.locked;
  }
}

int64_t PrefixTree::settle(const Insertion& job) {
  if (job.at.node < 0) return 0;
  // A followed tree leaves protection to its caller: the lease covers all that is stored.
  const Place last = is_followed() ? job.at : usable(job.at);
  if (job.lease != nullptr) {
    const int32_t node = end_at(last);
    if (node != job.lease->node) {
      hold(node);
      let_go(job.lease->node);
      job.lease->node = node;
    }
  }
  // What is stored is most recently used, and so is everything above it: no child is hotter than its parent.
  if (job.added() > 0 || job.lease == nullptr) {
    const int32_t used = job.added() > 0 ? job.at.node : end_at(last);
    touch(used);
    rejoin(used);
  }
  return last.depth;
}

void PrefixTree::prefetch_node(LeaseId lease) const {
  const int32_t node = leases_[static_cast<size_t>(lease.slot)].node;
  const char* at = reinterpret_cast<const char*>(&nodes_[node]);
  __builtin_prefetch(at, 1);
  __builtin_prefetch(at + sizeof(Node) - 1, 1);
  for (const auto& held : held_) __builtin_prefetch(held.data() + node, 1);
}

void PrefixTree::prefetch_tail(LeaseId lease) const {
  const Run& run = nodes_[leases_[static_cast<size_t>(lease.slot)].node].run;
  if (run.length == 0) return;
  runs_.prefetch_end(run);
  if (!set_of_.empty()) __builtin_prefetch(&owners_[run.tail], 1);
}

Inserted PrefixTree::insert(const Sequence& sequence, const std::vector<Ids>& columns, const LeaseId* lease_id,
                            const std::vector<Checkpoint>& checkpoints) {
  Lease* lease = nullptr;
  int32_t from = -1;
  if (lease_id != nullptr) {
    from = require(*lease_id).node;
    lease = &leases_[static_cast<size_t>(lease_id->slot)];
    if (nodes_[nodes_[from].root].is_dropped) {
      throw Stale("lease " + text(lease->number) + " belongs to a namespace that was dropped: release it");
    }
  } else {
    from = find_root(sequence.space);
  }
  const int64_t base = from < 0 ? 0 : nodes_[from].end();
  const int64_t end = base + math_.first_slot(math_.page(sequence.tokens.size));
  if (end > kMaxLength) throw BadArgument("tokens: a sequence must have fewer than 2^31");
  if (!extra_keys_.empty() || sequence.ranges != nullptr) require_tokens(sequence.tokens, 0);
  try {
    require_columns(sequence.tokens, columns);
    require_checkpoints(checkpoints, base, end);
  } catch (...) {
    require_tokens(sequence.tokens, 0);  // report the first bad token before anything else
    throw;
  }

  struct Tidy {
    ExtraKeys& keys;
    bool is_on;
    ~Tidy() {
      if (is_on) keys.tidy();
    }
  } tidy{extra_keys_, sequence.ranges != nullptr};
  Insertion job{sequence, columns, lease, from, base, sequence.tokens.data};
  std::vector<int32_t> translated;
  if (sequence.ranges != nullptr) {
    translated = extra_keys_.make(job.entries, sequence.tokens.size, base, *sequence.ranges);
    job.entries = translated.data();
  }

  path_.clear();
  job.at = {from, base};
  if (from >= 0) {
    job.at = walk<false>(job.at, job.entries, base, end, nullptr, [&](int32_t node, int64_t) {
      if (!is_plain()) path_.push_back(node);
    });
  }
  require_tokens(sequence.tokens, job.at.depth - base);  // those before it equal stored tokens
  job.present = job.at.depth;
  job.stored = end;
  if (has_states_ && !is_followed())
    job.stored = std::max<int64_t>(job.present, checkpoints.empty() ? 0 : checkpoints.back().length);
  if (has_windows_) find_holes(job);
  if (has_states_) find_checkpoints(job, checkpoints);

  Inserted result;
  result.present = job.present;
  result.stored = job.stored;
  if (!job.holes.empty()) result.filled.resize(windows_.size());
  for (const Hole& hole : job.holes) {
    result.filled[static_cast<size_t>(hole.column)].push_back(static_cast<int32_t>(hole.page));
  }
  for (const Checkpoint& checkpoint : job.taken) result.states.push_back(checkpoint.state_id);

  const bool grows = grows_in_place(job);
  reserve(4, 2 + runs_.chunks_to_append(grows ? nodes_[job.at.node].run : Run{}, job.added()));
  new_ids_.clear();
  for (const Ids& column : columns) new_ids_.push_back(column.data + math_.page(job.present - base));
  if (!job.taken.empty()) {
    const auto make_room = [&](int32_t node) {
      auto& all = checkpoints_[static_cast<size_t>(node)];
      all.reserve(all.size() + job.taken.size());
    };
    for (int32_t node : path_) make_room(node);
    if (from >= 0) make_room(job.at.node);
  }
  if (is_listened_) {
    write_news(job);
    events_.reserve(events_.size() + job.news.size());
  }

  ++now_;
  fill(job);
  if (job.added() > 0) store(job, grows);
  add_checkpoints(job);
  result.length = settle(job);
  if (is_listened_) tell(job.news);
  return result;
}

}  // namespace pagoda
