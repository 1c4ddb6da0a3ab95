#include "family.hpp"

#include <algorithm>

#include "mapping.hpp"

namespace kvd {

FamilyRules::FamilyRules(u64 chunk_tokens, std::vector<Group> groups)
    : chunk_tokens_(chunk_tokens), groups_(std::move(groups)) {
  if (chunk_tokens_ == 0 || chunk_tokens_ > (u64{1} << 32)) {
    fail<std::invalid_argument>("chunk_tokens = ", chunk_tokens_, ": 1 .. 2^32 is allowed");
  }
  if (groups_.empty() || groups_.size() > groups_max) {
    fail<std::invalid_argument>(groups_.size(), " groups: 1 .. ", groups_max, " are allowed");
  }
  for (const Group& group : groups_) {
    const bool windowed = group.kind == window || group.kind == chunked;
    if (group.kind > state || windowed != (group.window != 0)) {
      fail<std::invalid_argument>("a group of rule ", group.kind, " and window ", group.window);
    }
  }
}

void FamilyRules::add(u32 split, std::vector<Masks> masks) {
  if (split > 0xFFFF) fail<std::invalid_argument>("split = ", split, ": at most 65535");
  if (!masks.empty() && masks.size() != groups_.size()) {
    fail<std::invalid_argument>(masks.size(), " masks for ", groups_.size(), " groups");
  }
  if (this->masks(split) == nullptr) splits_.push_back({split, std::move(masks)});
}

const std::vector<FamilyRules::Masks>* FamilyRules::masks(u32 split) const noexcept {
  for (const Split& known : splits_) {
    if (known.code == split) return &known.masks;
  }
  return nullptr;
}

u64 FamilyRules::first_chunk(const Group& group, u64 chunks) const noexcept {
  const u64 tokens = chunks * chunk_tokens_;
  u64 first = 0;  // token
  switch (group.kind) {
    case full: return 0;
    case state: return chunks == 0 ? 0 : chunks - 1;
    case window: first = tokens > group.window - 1 ? tokens - (group.window - 1) : 0; break;
    default: first = tokens / group.window * group.window;
  }
  return first >= tokens ? chunks : first / chunk_tokens_;
}

u64 FamilyRules::first_needed(u64 chunks) const noexcept {
  u64 first = chunks;
  for (const Group& group : groups_) first = std::min(first, first_chunk(group, chunks));
  return first;
}

bool PrefixWalk::step(u64 low, u64 high, u32 split) noexcept {
  const auto& groups = rules_.groups();
  const std::vector<FamilyRules::Masks>* masks = nullptr;
  if ((low | high) != 0) {
    masks = rules_.masks(split);
    if (masks == nullptr) {
      unknown_ = static_cast<int>(split);
      return false;
    }
    if (masks->empty()) masks = nullptr;
  }
  ++taken_;
  bool usable = true;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const bool whole =
        masks != nullptr && (low & (*masks)[g].low) == (*masks)[g].low && (high & (*masks)[g].high) == (*masks)[g].high;
    runs_[g] = whole ? runs_[g] + 1 : 0;
    if (groups[g].kind == FamilyRules::full) {
      if (!whole) return false;
    } else {
      usable = usable && runs_[g] >= taken_ - rules_.first_chunk(groups[g], taken_);
    }
  }
  if (usable) usable_ = taken_;
  return true;
}

}  // namespace kvd
