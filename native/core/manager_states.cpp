// Running states and checkpoints: where prefills are saved, which checkpoint a save gets, and when the tree has it.
#include <algorithm>
#include <new>

#include "core/manager.hpp"

namespace pagoda {

namespace {

// How far beyond a checkpoint pages may match for its reuse to count as such, in tokens, and for the request to count
// as one that parts from others there, in pages.
constexpr int64_t kNearTokens = 1024, kNearPages = 64;

bool is_tail(CheckpointKind kind) { return kind == CheckpointKind::kFresh || kind == CheckpointKind::kContinued; }

}  // namespace

// ── where to save ───────────────────────────────────────────────────────────────────────────────────

bool Manager::parts(const Prompt& prompt, const Match& match) const {
  return match.goes_on && math_.page(match.found) < math_.page(prompt.most_hit());
}

std::vector<Manager::Cut> Manager::plan_cuts(const Prompt& prompt, const Match& match) const {
  std::vector<Cut> cuts;
  if (states_.num_checkpoints == 0) return cuts;
  const int64_t hit = match.length, last = math_.first_slot(math_.page(prompt.sequence.tokens.size - 1));
  const int64_t interval = std::max(math_.size(), math_.first_slot(math_.page(states_.interval)));
  const auto add = [&](int64_t length, CheckpointKind kind) {
    if (length > hit) cuts.push_back({static_cast<int32_t>(length), kind});
  };
  if (last <= hit) return cuts;
  cuts.reserve(static_cast<size_t>((last - hit) / interval + 3));
  // A tail, fresh or continued as the row is; unless another request had the whole prompt and went on.
  add(last, match.goes_on && match.found >= last ? CheckpointKind::kBranch : CheckpointKind::kFresh);
  int64_t next = (last - 1) / interval * interval;
  if (parts(prompt, match)) {
    for (; next > match.found; next -= interval) add(next, CheckpointKind::kInterval);
    add(match.found, CheckpointKind::kBranch);
    if (next == match.found) next -= interval;
  }
  for (; next > hit; next -= interval) add(next, CheckpointKind::kInterval);
  return cuts;
}

void Manager::set_next_save(int64_t number, int64_t above) {
  const Request& request = this->request(number);
  int64_t next = math_.first_slot(math_.pages_for(std::max(request.prompt_length, above) + 1));
  if (!request.cuts.empty()) next = request.cuts.back().length;
  row(number).next_save = row(number).is_stored && states_.num_checkpoints > 0
                              ? static_cast<int32_t>(std::min<int64_t>(next, kNever))
                              : kNever;
}

void Manager::start_state(int64_t number, const Prompt& prompt, const Match& match, std::vector<Cut>&& cuts) {
  Request& request = this->request(number);
  request.cuts.swap(cuts);
  request.prompt_length = prompt.sequence.tokens.size;
  request.is_continued = match.found > 0 && !match.goes_on;
  if (match.length == 0) {
    resets_.push_back(static_cast<int32_t>(number));
  } else {
    restores_.add(number, match.length, match.state_id);
    ++resumed_;
    const int64_t further = match.found - match.length;
    order_.resume(match.state_id, gap(match.state_id), further <= kNearTokens,
                  parts(prompt, match) && math_.page(further) <= kNearPages);
  }
  set_next_save(number, match.length);
}

void Manager::start_fork_state(int64_t parent, int64_t child) {
  Request& request = this->request(child);
  request.prompt_length = row(parent).committed;
  request.is_continued = this->request(parent).is_continued;
  const int32_t copied = state_source_of_[static_cast<size_t>(parent)];
  const int32_t source = copied != 0 ? copied : static_cast<int32_t>(parent);
  state_sources_.push_back(source);
  state_targets_.push_back(static_cast<int32_t>(child));
  state_source_of_[static_cast<size_t>(child)] = source;
  set_next_save(child, row(parent).committed);
}

void Manager::require_settled(int64_t number, const char* what) const {
  const Row& row = this->row(number);
  if (row.computed == row.committed) return;
  throw BadArgument("row " + text(number) + " has " + text(row.computed - row.committed) +
                    " tokens computed and not committed, which its state contains: cannot " + what +
                    " before they are committed");
}

int64_t Manager::last_planned(int64_t number, int64_t length) const {
  const Request& request = this->request(number);
  int64_t last = 0;
  const bool saves_intervals = checkpoint_ids_.num_free() > 0 || order_.has_second();
  for (const Cut& cut : request.cuts) {
    if (cut.length <= length && (saves_intervals || cut.kind != CheckpointKind::kInterval)) {
      last = cut.length;
      break;
    }
  }
  for (const Save& save : request.saves) {
    if (!save.is_rolling && save.length <= length) last = std::max<int64_t>(last, save.length);
  }
  return last;
}

// ── saves ───────────────────────────────────────────────────────────────────────────────────────────

void Manager::grow_saves(Ids rows, const PerRow& counts) {
  size_t num_due = 0;
  for (int64_t i = 0; i < rows.size; ++i) {
    if (row(rows[i]).computed + counts[i] < row(rows[i]).next_save) continue;
    ++num_due;
    auto& saves = request(rows[i]).saves;
    if (saves.size() == saves.capacity()) saves.reserve(2 * saves.size() + 2);
  }
  due_.reserve(num_due);
  // The next delta's saves are listed after this one's are written.
  for (auto* each : {&saves_.rows, &saves_.lengths, &saves_.ids}) grow(*each, num_due);
}

void Manager::plan_save(int64_t number) {
  Row& row = this->row(number);
  Request& request = this->request(number);
  const int32_t length = row.computed;
  Save save{length, 0, request.is_continued ? CheckpointKind::kContinued : CheckpointKind::kFresh, false};
  bool is_due = false;
  for (auto& cuts = request.cuts; !cuts.empty() && cuts.back().length <= length; cuts.pop_back()) {
    if (cuts.back().length < length) continue;  // the step ran past it
    is_due = true;
    if (!is_tail(cuts.back().kind)) save.kind = cuts.back().kind;
  }
  if (!is_due && length > request.prompt_length && math_.offset(length) == 0) save.is_rolling = is_due = true;
  set_next_save(number, length);
  if (!is_due) return;
  const auto is_rolling = [](const Save& each) { return each.is_rolling; };
  if (save.is_rolling && std::none_of(request.saves.begin(), request.saves.end(), is_rolling)) {
    // It will supersede the prompt's tail, which may make room for it.
    supersede_tail(tree_.last_checkpoint(request.lease, row.stored).state_id);
  }
  save.id = take_checkpoint(number, save);
  if (save.id == 0) return;
  request.saves.push_back(save);
  row.next_kept = kNever;
  for (const Save& each : request.saves) {
    if (each.length > row.committed) row.next_kept = std::min(row.next_kept, each.length);
  }
  saves_.add(number, length, save.id);
}

// Returns a checkpoint for a save: a free one, or for a rolling save the row's own, or one that the tree gives up. 0 if
// there is none; the save is then left out. While steps are in flight, the row may end before the tokens of the new
// save are committed, so it keeps its own until then if there is another.
int32_t Manager::take_checkpoint(int64_t number, const Save& wanted) {
  int32_t id = 0;
  if (checkpoint_ids_.num_free() == 0) {
    auto& saves = request(number).saves;
    const auto own = wanted.is_rolling
                         ? std::find_if(saves.begin(), saves.end(), [](const Save& save) { return save.is_rolling; })
                         : saves.end();
    const bool is_last = own != saves.end() && own->length <= row(number).committed && passed_ < step_ - 2;
    if (own == saves.end() || is_last) id = give_up_checkpoint(wanted.kind != CheckpointKind::kInterval);
    if (id == 0) {
      if (own == saves.end()) return 0;
      id = own->id;
      saves.erase(own);
      return id;
    }
  }
  checkpoint_ids_.alloc(1, &id);
  return id;
}

// Frees a checkpoint of the tree, of the second class or also of the first, and returns it; 0 if there is none.
int32_t Manager::give_up_checkpoint(bool also_first) {
  const int32_t id = order_.next(also_first, [&](int32_t each) { return gap(each); });
  if (id == 0) return 0;
  try {
    tree_.remove_checkpoint(id);
  } catch (const std::bad_alloc&) {  // no memory for the event: the tree keeps it
    return 0;
  }
  order_.give_up(id);
  free_checkpoint(id);
  ++evicted_states_;
  return id;
}

void Manager::keep_saves(int64_t number) {
  Row& row = this->row(number);
  auto& saves = request(number).saves;
  int32_t rolling = 0;  // the last rolling save whose tokens are committed
  for (const Save& save : saves) {
    if (save.is_rolling && save.length <= row.committed) rolling = std::max(rolling, save.length);
  }
  row.next_kept = kNever;
  size_t kept = 0;
  for (const Save& save : saves) {
    if (save.length > row.committed) {
      row.next_kept = std::min(row.next_kept, save.length);
    } else if (!save.is_rolling) {
      keep(number, save);
      continue;
    } else if (save.length < rolling) {
      free_checkpoint(save.id);
      continue;
    }
    saves[kept++] = save;
  }
  saves.resize(kept);
}

void Manager::keep(int64_t number, const Save& save) {
  bool is_kept = false;
  try {
    is_kept = tree_.add_checkpoint(request(number).lease, {save.length, save.id});
  } catch (const std::bad_alloc&) {  // it is left out
  }
  if (!is_kept) return free_checkpoint(save.id);
  ++saved_;
  order_.add(save.id, save.kind, gap(save.id));
  if (is_tail(save.kind)) supersede_tail(tree_.checkpoint_before(save.id).state_id);
}

// Supersedes the tail that a new one continues, if nothing of the first class is between them. id: the last checkpoint
// before the new one, −1 if there is none.
void Manager::supersede_tail(int32_t id) {
  while (id >= 0 && order_.is_second(id)) id = tree_.checkpoint_before(id).state_id;
  if (id >= 0 && is_tail(order_.kind(id))) order_.supersede(id, gap(id));
}

void Manager::end_saves(int64_t number) {
  const Save* last = nullptr;
  for (const Save& save : request(number).saves) {
    const bool is_last =
        save.is_rolling && save.length <= row(number).committed && (last == nullptr || save.length > last->length);
    if (is_last) last = &save;
  }
  for (const Save& save : request(number).saves) {
    if (&save != last) free_checkpoint(save.id);
  }
  if (last != nullptr) keep(number, *last);
  request(number).saves.clear();
}

void Manager::forget_saves(int64_t number) {
  for (const Save& save : request(number).saves) free_checkpoint(save.id);
  request(number).saves.clear();
  request(number).cuts.clear();
  row(number).next_save = row(number).next_kept = kNever;
}

void Manager::free_states() {
  for (const int32_t id : freed_states_) {
    order_.remove(id);
    free_checkpoint(id);
  }
  evicted_states_ += static_cast<int64_t>(freed_states_.size());
  freed_states_.clear();
}

void Manager::give_up_lost() {
  if (!tree_.has_lost()) return;
  for (int32_t id = 1; id <= states_.num_checkpoints; ++id) {
    if (!tree_.has_checkpoint(id) || !tree_.is_lost_checkpoint(id)) continue;
    tree_.remove_checkpoint(id);  // nobody is told of what cannot be found, so this cannot fail
    order_.remove(id);
    free_checkpoint(id);
  }
}

Manager::Checkpoints Manager::checkpoints() const {
  const int64_t free = checkpoint_ids_.num_free(), cached = tree_.states().total;
  return {free, cached, states_.num_checkpoints - free - cached, saved_, resumed_, evicted_states_};
}

// ── checks ──────────────────────────────────────────────────────────────────────────────────────────

// Checks that every checkpoint has one owner: the free-list, the tree, or one row.
void Manager::check_states() const {
  if (!states_.has_states) return;
  checkpoint_ids_.check();
  if (!order_.is_right()) broken("the order of checkpoints is broken");
  BitSet owned(states_.num_checkpoints + 1);
  int64_t num_cached = 0, num_own = 0;
  for (int32_t id = 1; id <= states_.num_checkpoints; ++id) {
    if (tree_.has_checkpoint(id) != order_.contains(id)) broken("checkpoint " + text(id) + " is not listed as it is");
    if (!tree_.has_checkpoint(id)) continue;
    ++num_cached;
    owned.insert(id);
    if (!checkpoint_ids_.is_held(id)) broken("checkpoint " + text(id) + " is in the tree, but not held");
  }
  for (int64_t number = 1; number <= num_rows_; ++number) {
    const Row& row = this->row(number);
    const Request& request = this->request(number);
    const std::string who = "row " + text(number);
    if (!row.is_running && !(request.saves.empty() && request.cuts.empty())) broken(who + " ended and has saves");
    int32_t least = kNever;
    for (const Save& save : request.saves) {
      ++num_own;
      if (owned.contains(save.id) || !checkpoint_ids_.is_held(save.id)) {
        broken(who + " has checkpoint " + text(save.id) + ", which is not its own");
      }
      owned.insert(save.id);
      if (math_.offset(save.length) != 0 || save.length > row.computed) broken(who + " has a save it did not reach");
      if (save.length > row.committed) least = std::min(least, save.length);
      if (!save.is_rolling && save.length <= row.committed) broken(who + " keeps a save that the tree should have");
    }
    if (row.is_running && row.next_kept != least) broken(who + " does not know its next save");
    for (size_t i = 0; i < request.cuts.size(); ++i) {
      if (request.cuts[i].length <= row.computed || (i > 0 && request.cuts[i].length >= request.cuts[i - 1].length)) {
        broken(who + " has cuts that are out of order");
      }
    }
    if (row.is_running && row.next_save <= row.computed) broken(who + " has passed its next save");
  }
  if (num_cached != tree_.states().total || num_cached != order_.size() ||
      num_cached + num_own != checkpoint_ids_.num_held()) {
    broken(text(checkpoint_ids_.num_held()) + " checkpoints are held, " + text(num_cached) + " by the tree and " +
           text(num_own) + " by rows");
  }
}

}  // namespace pagoda
