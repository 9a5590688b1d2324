// SPDX-License-Identifier: Apache-2.0
// The link's end of lane stream.
#include <system_error>
#include <utility>

#include "context.h"
#include "link.h"
#include "memory.h"
#include "reactor.h"
#include "status.h"
#include "writer.h"

namespace kvrail {

void Link::read_stream(Fd listener, const StreamSecret& secret, StreamReader::Targets targets) {
  for (const auto& [id, target] : targets) {
    const auto region = context().find_region(target.base, target.nbytes);
    if (!region || !region->is_host())
      throw UcxError("read_stream", UCS_ERR_INVALID_ADDR,
                     "pool " + std::to_string(id) + " is not in registered host memory");
  }
  // (A command can be copied, a descriptor cannot.)
  auto fd = std::make_shared<Fd>(std::move(listener));
  open_stream([fd = std::move(fd), secret, targets = std::move(targets)](Link& link) {
    link.reader_ = std::make_unique<StreamReader>(link, std::move(*fd), secret, targets);
  });
}

void Link::write_stream(Fd connection, const StreamSecret& secret) {
  auto fd = std::make_shared<Fd>(std::move(connection));
  open_stream([fd = std::move(fd), secret](Link& link) {
    link.streamer_ = std::make_unique<StreamWriter>(link, std::move(*fd), secret);
  });
}

void Link::open_stream(std::function<void(Link&)> open) {
  command([open = std::move(open)](Link& link) {
    if (!link.usable() || link.reader_ || link.streamer_) return;
    try {
      open(link);
    } catch (const std::system_error& error) {
      // No thread for it, or no descriptor.
      link.stream_failed(error.what(), false);
    }
  });
}

void Link::settle_stream(bool used) {
  command([used](Link& link) {
    link.stream_used_ = used;
    if (!used) return link.end_stream();
    if (!link.stream_fault_.empty()) link.stream_failed(link.stream_fault_, false);
  });
}

bool Link::stream(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch) {
  // One that is told to end may have looked at its orders for the last time.
  if (!streamer_ || stream_ended_) return false;
  ++posted_;
  streamer_->carry(std::move(writer), std::move(batch));
  return true;
}

void Link::stream_done(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch, bool refused, ucs_status_t status,
                       std::string reason) {
  // The batch goes along: it may be the last to hold its pool, whose key only the reactor's thread may destroy.
  light_command(
      [writer = std::move(writer), batch = std::move(batch), refused, status, reason = std::move(reason)](Link& link) {
        writer->share_done(refused, status, reason);
        link.schedule(writer);
      });
}

void Link::stream_failed(const std::string& reason, bool forbidden) {
  stream_fault_ = reason;
  // Before the lane is decided the link can do without it.
  if (usable() && (stream_used_ || forbidden))
    break_off(forbidden ? UCS_ERR_INVALID_PARAM : UCS_ERR_CONNECTION_RESET, "lane stream: " + stream_fault_);
}

void Link::end_stream() {
  stream_ended_ = true;
  if (reader_) reader_->end();
  if (streamer_) streamer_->end();
}

void Link::stream_over() {
  // Their last words were this: they are about to return.
  reader_.reset();
  streamer_.reset();
}

}  // namespace kvrail
